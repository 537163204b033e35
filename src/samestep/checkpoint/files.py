"""Durable file operations and disk errors."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from samestep.errors import CheckpointWriteError

# A system call writes less than 2 GiB; smaller chunks let other threads of this process run in between.
_CHUNK_BYTES = 1 << 24

_FREE_SPACE = "free space there, or keep fewer checkpoints"
_MAKE_WRITABLE = "make the folder writable for this user"
_FIXES = {
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: _FREE_SPACE,
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
    errno.EROFS: _MAKE_WRITABLE,
    errno.EACCES: _MAKE_WRITABLE,
    errno.EPERM: _MAKE_WRITABLE,
    errno.EIO: "check the system log for disk faults",
}


@contextmanager
def disk_errors(problem: str, expected: str) -> Iterator[None]:
    """Convert an `OSError` of the block to an error with `problem`, the system's reason and a fix.

    Raises:
        CheckpointWriteError: in place of an `OSError`.
    """
    try:
        yield
    except OSError as error:
        fix = _FIXES.get(error.errno or 0, "check the folder and its disk")
        raise CheckpointWriteError(
            f"{problem}: {error.strerror or error}",
            expected=expected,
            fix=f"{fix}; then resume from the newest checkpoint",
        ) from error


def write_file(path: Path, data: bytes) -> None:
    """Write a new file and force its contents to the disk."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest[:_CHUNK_BYTES]) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path in the folder of `path`; rename it to `path` after the block, remove it on failure."""
    temporary = path.with_name(f".{path.name}-{os.getpid()}-{secrets.token_hex(4)}")
    try:
        yield temporary
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def make_folder(path: Path) -> None:
    """Create a folder and its missing parents, and force their names to the disk."""
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)  # another rank may create it at the same time
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Force the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a folder with its contents, a file or a link, if present."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
