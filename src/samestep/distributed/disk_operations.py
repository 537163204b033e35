"""Disk operations in progress, for reports about a disk that does not answer."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from samestep.distributed.status import RankStatus

_SHOWN_CHARACTERS = 90
_DESCRIPTOR = re.compile(r"^/proc/self/fd/\d+")  # path of a folder that can be moved


class DiskOperations:
    """Disk operations of all threads of this process.

    Attributes:
        rank_status: status of this rank, which shows the operation that began last; None outside of `samestep.start()`.
    """

    def __init__(self) -> None:
        self.rank_status: RankStatus | None = None
        self._pending: dict[int, tuple[int, str]] = {}
        self._count = 0

    @contextmanager
    def run(self, name: str, path: Path | str) -> Iterator[None]:
        """Record an operation for the duration of the block."""
        thread, text = threading.get_ident(), _DESCRIPTOR.sub(_present_path, str(path))
        outer = self._pending.get(thread)
        self._count += 1
        self._pending[thread] = (self._count, f"{name} of {text if len(text) < _SHOWN_CHARACTERS else _tail(text)}")
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
        """Return the number of the operation of a thread, or None; the number differs between two operations."""
        operation = self._pending.get(thread) if thread is not None else None
        return operation[0] if operation is not None else None

    def _show(self) -> None:
        if self.rank_status is not None:
            texts = [text for _, text in sorted(self._pending.copy().values())]
            self.rank_status.show_disk_operation(texts[-1] if texts else "")


def _present_path(match: re.Match[str]) -> str:
    try:
        return os.readlink(match[0])
    except OSError:
        return match[0]


def _tail(text: str) -> str:
    return f"...{text[3 - _SHOWN_CHARACTERS :]}"


# The only instance: the threads of a process share its disks.
disk_operations = DiskOperations()
