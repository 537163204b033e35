"""Files and folders that are on the disk when a function returns, and errors of the disk in words."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from samestep.errors import CheckpointWriteError

# A system call takes less than 2 GiB; smaller pieces leave the other threads of this process their turn.
_PIECE = 1 << 24

_FREE_SPACE = "free space there, or keep fewer checkpoints"
_MAKE_WRITABLE = "make the folder writable for this user"
_WAYS_OUT = {
    errno.ENOSPC: _FREE_SPACE,
    errno.EDQUOT: _FREE_SPACE,
    errno.EFBIG: "raise the limit on the size of a file (ulimit -f)",
    errno.EROFS: _MAKE_WRITABLE,
    errno.EACCES: _MAKE_WRITABLE,
    errno.EPERM: _MAKE_WRITABLE,
    errno.EIO: "look for faults of the disk in the system's log",
}


@contextmanager
def write_errors(what: str, rule: str) -> Iterator[None]:
    """Turn an error of the disk into one that says what could not be done, and the way out.

    Raises:
        CheckpointWriteError: in the place of an `OSError`.
    """
    try:
        yield
    except OSError as error:
        way_out = _WAYS_OUT.get(error.errno or 0, "look at the folder and its disk")
        raise CheckpointWriteError(
            f"{what}: {error.strerror or error}", rule=rule, do=f"{way_out}; then go on from the newest checkpoint"
        ) from error


def write_file(path: Path, data: bytes) -> None:
    """Write a new file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest[:_PIECE]) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Make a folder and those above it, where they are missing."""
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)  # another rank may be as far
        sync_folder(folder.parent)


def sync_folder(path: Path) -> None:
    """Force the names in a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(path: Path) -> None:
    """Remove a folder with all that is in it, a file or a link; nothing where there is nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
