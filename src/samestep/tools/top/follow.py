"""A file of lines that another process appends to, read on from where it was read to."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_BLOCK = 1 << 20


class Follower:
    """Hands out each line once, when it is whole.

    A file that became shorter, or that another one took the place of, is read from its beginning.

    Args:
        last_bytes: of what is there at first, only so much from the end; None for all.
    """

    def __init__(self, path: Path, last_bytes: int | None = None) -> None:
        self._path, self._last_bytes = path, last_bytes
        self._file: tuple[int, int] | None = None
        self._offset, self._rest = 0, b""

    def new_lines(self) -> Iterator[bytes]:
        """The lines that were ended since this was last asked; none where there is no such file."""
        try:
            # Opened each time: that is when a network file system looks for what other machines have written.
            file = self._path.open("rb")
        except FileNotFoundError:
            return
        with file:
            status = os.fstat(file.fileno())
            which = status.st_dev, status.st_ino
            if which != self._file or status.st_size < self._offset:
                self._file, self._offset, self._rest = which, 0, b""
                if self._last_bytes is not None and status.st_size > self._last_bytes:
                    file.seek(status.st_size - self._last_bytes)
                    self._offset = file.tell() + len(file.readline())  # the rest of a line
            file.seek(self._offset)
            while block := file.read(_BLOCK):
                self._offset += len(block)
                *whole, self._rest = (self._rest + block).split(b"\n")
                yield from whole
