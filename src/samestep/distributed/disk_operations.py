"""Disk operations in progress, for reports on hangs; small files; folders that keep their path."""

from __future__ import annotations

import errno
import os
import stat
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from samestep.distributed.status import RankStatus
from samestep.errors import RunMovedError

_SHOWN_CHARACTERS = 90
_SMALL_BYTES = 1 << 26  # far more than Samestep writes to a file that it reads in one piece


def regular_file(path: str, flags: int) -> int:
    """Open a file that others may have made, as the `opener` of `open`.

    Raises:
        OSError: it is no regular file: a FIFO or a device may never end, and even its opening may
            never return.
    """
    descriptor = os.open(path, flags | os.O_NONBLOCK, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no regular file", path)
    return descriptor


def read_small(path: Path, most: int = _SMALL_BYTES) -> bytes:
    """Return the contents of a regular file of at most `most` bytes.

    Raises:
        OSError: it cannot be read, is no regular file, or is larger.
    """
    with open(path, "rb", opener=regular_file) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it has more than {most:,} bytes", str(path))
    return content


class DiskOperations:
    """Disk operations of all threads of this process."""

    def __init__(self) -> None:
        # Shows the operation that began last; None outside of `samestep.init()`.
        self.rank_status: RankStatus | None = None
        self._pending: dict[int, tuple[int, str]] = {}
        self._count = 0

    @contextmanager
    def run(self, name: str, path: Path | str) -> Iterator[None]:
        """Record an operation for the duration of the block."""
        thread = threading.get_ident()
        text = str(path)
        outer = self._pending.get(thread)
        self._count += 1
        if len(text) >= _SHOWN_CHARACTERS:
            text = f"...{text[3 - _SHOWN_CHARACTERS :]}"
        self._pending[thread] = (self._count, f"{name} of {text}")
        self._show()
        try:
            yield
        finally:
            if outer is None:
                del self._pending[thread]
            else:
                self._pending[thread] = outer
            self._show()

    def pending(self, thread: int | None) -> int | None:
        """Return the number of the operation of a thread, which no other operation has."""
        # One access: the thread may end the operation between two.
        if thread is not None and (operation := self._pending.get(thread)) is not None:
            return operation[0]
        return None

    def _show(self) -> None:
        if self.rank_status is not None:
            # A copy: other threads begin and end operations meanwhile.
            _, last = max(self._pending.copy().values(), default=(0, ""))
            self.rank_status.show_disk_operation(last)


# The only instance: the threads of a process share its disks.
disk_operations = DiskOperations()


class HeldFolder:
    """An existing folder that notices when it was moved, or when another one has its path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        # While the folder is open, the system gives its number to no other folder.
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        weakref.finalize(self, os.close, self._descriptor)

    def is_in_place(self) -> bool:
        """Return whether the folder still has its path."""
        with disk_operations.run("status", self.path):
            return self.path.is_dir() and os.path.samestat(
                self.path.stat(), os.fstat(self._descriptor)
            )

    def require_in_place(self) -> None:
        """Require that the folder still has its path.

        Raises:
            RunMovedError: the folder was moved, removed or replaced.
        """
        if not self.is_in_place():
            raise RunMovedError(
                f"{self.path} was moved, removed or replaced",
                expected="the directory of a run keeps its path while the run writes to it",
                fix="resume the run with the new path of its directory",
            )
