"""Lock of a folder that one process writes to."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from samestep.distributed.disk_operations import regular_file
from samestep.distributed.logging import logger
from samestep.errors import InputError

if TYPE_CHECKING:
    from filelock import BaseFileLock

LOCK = ".lock"

# Errors of file systems without locks, such as Lustre mounted without `flock`.
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class FolderLock:
    """Lock that keeps other processes from writing to a folder.

    The lock is flock(2) on the file `.lock`, released by the kernel with the process; the remaining
    file has no meaning. Objects of one process share the lock, for example when a notebook creates
    a second one before the first is deleted; the lock ends with the last of them.

    Args:
        folder: created if missing.
        timeout: seconds to wait for another process, which may be about to end.

    Raises:
        InputError: another process holds the lock, or the folder cannot be locked.
    """

    def __init__(self, folder: Path, timeout: float = 5.0) -> None:
        # Lazy: `is_locked` works without this import of 35 ms.
        from filelock import FileLock, Timeout

        self._lock: BaseFileLock | None = None
        # Without links: objects share the lock by this path.
        path = folder.resolve() / LOCK
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            # Only users with write access to the folder can open the file and lock it.
            writers = path.parent.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)
            lock = FileLock(
                path,
                # The bit of reading is the one above that of writing.
                mode=stat.S_IRUSR | stat.S_IWUSR | writers | writers << 1,
                thread_local=False,  # any thread may release the lock
                is_singleton=True,
                fallback_to_soft=False,  # a file that a killed process leaves behind
                on_acquired=_write_holder,
            )
            lock.acquire(timeout=timeout)
        except Timeout:
            holder = path.read_text(encoding="utf-8", errors="replace")[:200].strip()
            raise InputError(
                f"{folder} is in use by {holder or 'another process'}",
                expected="one run at a time writes to a directory",
                fix="wait for the end of that process, end it, or choose another directory",
                code="E_LOCKED",
            ) from None
        except OSError as error:
            if error.errno in _NO_LOCKS:
                problem = "%s is on a file system without locks: a second run there is not refused"
                logger.warning(problem, folder)
                return
            raise InputError(
                f"{folder} cannot be locked: {error.strerror}",
                expected="a writable directory",
                fix="make the directory writable, free space, or choose another one",
                code="E_LOCKED",
            ) from error
        self._lock = lock

    def release(self) -> None:
        """Release the lock; further calls have no effect."""
        lock = self._lock
        self._lock = None
        if lock is not None:
            lock.release()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def _write_holder(descriptor: int) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)


def is_locked(folder: Path) -> bool | None:
    """Return whether a process holds the lock of a folder, or None if unknown.

    The check itself holds a shared lock for an instant; a process that locks the folder at that
    time retries.
    """
    try:
        with open(folder / LOCK, "rb", opener=regular_file) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    except OSError:
        return None
    return False
