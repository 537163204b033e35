"""Files of one JSON object a line, as a run that may have been killed at any moment left them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from samestep.record.events import read_line

# What every line begins with. A run that goes on after a kill writes behind what may be half a line.
_BEGINNING = b'{"time"'


class JsonLines:
    """The objects of such a file, first to last; none where there is no file.

    Attributes:
        unreadable: lines passed over so far: cut off by a kill, or damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.unreadable = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self._path.is_file():
            return
        with self._path.open("rb") as file:
            for line in file:
                found = read_line(line)
                if found is None and line.strip(b"\0 \t\r\n"):
                    self.unreadable += 1
                    found = read_line(line[max(line.rfind(_BEGINNING), 0) :])
                if found is not None:
                    yield found


def number(value: object) -> float | None:
    """A number as events have it: NaN and infinity as their names; None for anything else."""
    if isinstance(value, str):
        return float(value) if value in ("nan", "inf", "-inf") else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def finite(value: object) -> float | None:
    """A number, if it is neither NaN nor infinite."""
    found = number(value)
    return found if found is not None and abs(found) < float("inf") else None


def whole(value: object) -> int | None:
    """A count, such as that of steps."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < 2**53 else None


def text(value: object) -> str:
    """A text; empty for anything else."""
    return value if isinstance(value, str) else ""
