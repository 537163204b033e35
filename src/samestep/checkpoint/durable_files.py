"""Durable file operations, and disk errors."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from samestep.distributed.disk_operations import disk_operations
from samestep.errors import CheckpointWriteError, RunError

# A system call writes less than 2 GiB; smaller chunks let other threads of this process run in
# between.
_CHUNK_BYTES = 1 << 24
_MAX_NAME_BYTES = 256
_TRIAL = ".trial-"  # prefix of the folders of `unsupported_features`

# Contents of a file: bytes, or pieces of them that can be iterated over more than once.
Piece = bytes | memoryview
Contents = bytes | Iterable[Piece]

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
    errno.EXDEV: "choose a folder on another file system (--runs DIR): "
    "this one cannot rename folders",
}
# Errors of file systems without an operation, such as FAT, 9p and some FUSE file systems.
_NOT_SUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM)


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


def pieces(contents: Contents) -> Iterator[Piece]:
    """Yield the contents of a file in order."""
    if isinstance(contents, bytes):
        yield contents
    else:
        yield from contents


def write_file(path: Path, contents: Contents) -> None:
    """Write a new file and force its contents to the disk."""
    with disk_operations.run("open", path):
        # Exclusive: two writers of one file would mix their contents.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        for piece in pieces(contents):
            rest = memoryview(piece)
            while rest:
                with disk_operations.run("write", path):
                    rest = rest[os.write(descriptor, rest[:_CHUNK_BYTES]) :]
        with disk_operations.run("fsync", path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, text: str) -> None:
    """Replace a small file and force it to the disk; a kill leaves the old or the new contents.

    Raises:
        RunError: the file cannot be written; the old contents are unchanged.
    """
    # A fixed name: files of killed processes do not add up. One process writes each of these files.
    temporary = path.with_name(f".{path.name}.writing")
    try:
        temporary.unlink(missing_ok=True)  # of a process that was killed
        try:
            write_file(temporary, text.encode())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise RunError(
            f"{path} cannot be written: {error.strerror or error}",
            expected="a folder that can be written",
            fix=_FIXES.get(error.errno or 0, "check the folder and its disk"),
            code="E_OUTPUT",
        ) from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path`, to which it is renamed after the block."""
    # Random text too: processes on two machines can have the same number.
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


def sync_folder(path: Path) -> bool:
    """Force the names in a folder to the disk; return whether the file system supports that."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with disk_operations.run("fsync", path):
            os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise
        return False
    finally:
        os.close(descriptor)
    return True


def link_name(path: Path, target: str) -> bool:
    """Make `path` a link to the name `target` in the same folder; return whether it is a link.

    On a file system without links, it is a file with the name.
    """
    # A link cannot be changed in place, only replaced by another one.
    with replacing(path) as temporary:
        try:
            temporary.symlink_to(target)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
            write_file(temporary, target.encode())
            return False
    return True


def linked_name(path: Path) -> str | None:
    """Return the name that `link_name` has written, or None."""
    if path.is_symlink():
        return str(path.readlink())
    if not path.is_file():
        return None
    with path.open("rb") as file:
        # Bounded: any file can be at this path.
        return file.read(_MAX_NAME_BYTES).decode(errors="replace")


def remove(path: Path) -> None:
    """Remove a folder with its contents, a file or a link, if present."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def unsupported_features(folder: Path) -> list[str]:
    """Try the operations of a save in a folder; return those that its file system does not have.

    Raises:
        CheckpointWriteError: the file system lacks an operation that a save needs.
    """
    for leftover in folder.glob(f"{_TRIAL}*"):  # of a process that was killed
        remove(leftover)
    trial = folder / f"{_TRIAL}{secrets.token_hex(4)}"
    names = []
    with disk_errors(
        f"a trial of the operations of a checkpoint failed in {folder}", "a folder for checkpoints"
    ):
        try:
            (trial / "written").mkdir(parents=True)
            write_file(trial / "written" / "file", b"1")
            if not sync_folder(trial / "written"):
                names.append("folder fsync")
            (trial / "written").rename(trial / "renamed")
            if not link_name(trial / "link", "renamed"):
                names.append("symbolic links")
        finally:
            remove(trial)
    return names
