"""One process at a time writes into a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import threading
import time
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from samestep.errors import InputError

LOCK = ".lock"
_PATIENCE_SECONDS = 5.0
_NAP_SECONDS = 0.05
# What file systems say that have no such locks, Lustre mounted without `flock` for one: a run must be possible there.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


@dataclass
class _Held:
    """A lock of this process, and how many objects share it."""

    descriptor: int
    process: int
    holders: int = 0


_held: dict[Path, _Held] = {}
# A finalizer can run in the middle of anything, `_hold` included.
_guard = threading.RLock()


class FolderLock:
    """Keeps other processes out of a folder until it is released, or no longer referred to, or the process ends.

    It is the kernel's (flock(2)), so whatever ends the process releases it: the file that stays behind means nothing.
    It tells processes apart, not objects: in one process, those of one folder share it, as when a notebook makes a new
    one before the old one is gone. Where the file system has no locks, nobody is kept out.

    Args:
        folder: is made if it is not there.
        patience: seconds to wait for another process, which may be about to end.

    Raises:
        InputError: another process has the folder, or it cannot be locked.
    """

    def __init__(self, folder: Path, patience: float = _PATIENCE_SECONDS) -> None:
        key = folder.resolve()
        with _guard:
            if key not in _held:
                _held[key] = _Held(_acquire(folder, patience), os.getpid())
            _held[key].holders += 1
        self._release = weakref.finalize(self, _let_go, key)

    def release(self) -> None:
        """Let others in; once is enough."""
        self._release()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def is_locked(folder: Path) -> bool | None:
    """Whether a process has the folder now; None where the system does not tell.

    For an instant this keeps out a process that comes, which tries again.
    """
    try:
        descriptor = os.open(folder / LOCK, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return False


def _acquire(folder: Path, patience: float) -> int:
    """A descriptor that holds the lock of `folder`."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _wait_for_turn(folder, descriptor, patience)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
    except OSError as error:
        raise InputError(
            f"{folder} cannot be locked: {error.strerror}",
            rule="a run keeps other processes out of its directory, by a file in it",
            do="make it writable for this user, free space there, or choose another directory",
        ) from error
    return descriptor


def _wait_for_turn(folder: Path, descriptor: int, patience: float) -> None:
    deadline = time.monotonic() + patience
    while not _taken(descriptor):
        if time.monotonic() > deadline:
            said = os.pread(descriptor, 200, 0).decode(errors="replace").strip()
            raise InputError(
                f"{folder} is in use by {said or 'another process'}",
                rule="one run at a time writes into a directory",
                do="wait until it ends, end it, or choose another directory",
            )
        time.sleep(_NAP_SECONDS)


def _taken(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


def _let_go(key: Path) -> None:
    with _guard:
        held = _held[key]
        held.holders -= 1
        # A fork of the process has the descriptor too, but the lock is its parent's.
        if held.holders == 0 and held.process == os.getpid():
            del _held[key]
            with suppress(OSError):  # of a file system without locks
                fcntl.flock(held.descriptor, fcntl.LOCK_UN)  # closing is not enough where a fork has it open
            os.close(held.descriptor)
