"""Lines of events and of ranks, as `top` and `report` read them from a run directory.

A line can be cut by a kill. Text has no control characters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from samestep.errors import InputError, printable
from samestep.loggers.logger import parse_json_line


def parse_number(value: object) -> float | None:
    """Return a number of an event, in which strings represent NaN and infinities; None for any other value."""
    if isinstance(value, str):
        return float(value) if value in ("nan", "inf", "-inf") else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def parse_finite(value: object) -> float | None:
    """Return a finite number; None for any other value."""
    number = parse_number(value)
    return number if number is not None and abs(number) < float("inf") else None


def parse_count(value: object) -> int | None:
    """Return a non-negative integer below 2^53; None for any other value."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**53
    return value if is_count else None  # type: ignore[return-value]


def parse_text(value: object) -> str:
    """Return a string; empty for any other value."""
    return value if isinstance(value, str) else ""


def parse_line(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line, in which `time` is a Unix timestamp; None if the line has none."""
    value = parse_json_line(line)
    return (
        _cleaned(value)
        if value is not None and parse_finite(value.get("time")) is not None
        else None
    )


def read_objects(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON file with a list of objects.

    Raises:
        ValueError: the file is damaged.
        OSError: the file cannot be read.
    """
    content = json.loads(path.read_bytes())
    return [_cleaned(entry) for entry in content if isinstance(entry, dict)]


@contextmanager
def run_errors(folder: Path) -> Iterator[None]:
    """Report an `OSError` of the block, which reads the directory of a run, as an `InputError`."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"{error.filename or folder} cannot be read: {error.strerror}",
            expected="a run directory with readable files",
            fix="correct the path or the permissions",
            code="E_UNREADABLE",
        ) from error


def _cleaned(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value.replace("\n", " "))
    if isinstance(value, dict):
        return {_cleaned(name): _cleaned(item) for name, item in value.items()}
    return [_cleaned(item) for item in value] if isinstance(value, list) else value
