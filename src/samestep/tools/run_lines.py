"""Lines of events and of ranks, as `top` and `report` read them from a run directory.

A line can be cut by a kill, damaged, or written by another program. Invalid lines are counted, text has no control
characters, and neither a value nor a file takes unlimited memory or time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from samestep.errors import InputError
from samestep.loggers.logger import parse_json_line
from samestep.report_limits import printable

MAX_LINE_BYTES = 2**20
_MAX_FILE_BYTES = 2**24  # of a file that is read at once
_MAX_CHARACTERS, _MAX_ITEMS, _MAX_DEPTH = 500, 100, 4
_MAX_NUMBER = 1e18
_MAX_TIME = 1e11  # seconds since 1970, in the year 5138


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
    """Return the object of a line, in which `time` is a Unix timestamp; None if the line has none.

    Long texts and lists are cut, and numbers beyond 10^18 become None.
    """
    value = parse_json_line(line) if len(line) <= MAX_LINE_BYTES else None
    if value is None:
        return None
    time = parse_finite(value.get("time"))
    return _cleaned_object(value, 0) if time is not None and 0 <= time <= _MAX_TIME else None


def read_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file; a line that is too long comes in parts, which are not valid lines."""
    while line := file.readline(MAX_LINE_BYTES):
        yield line


def read_objects(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a JSON file with an object or a list of objects, without its other values.

    Raises:
        ValueError: the file is too large, or damaged.
        OSError: the file cannot be read.
    """
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise ValueError(f"the file is larger than {_MAX_FILE_BYTES:,} bytes")
    try:
        content = json.loads(path.read_bytes())
    except RecursionError as error:
        raise ValueError("the values are nested too deeply") from error
    entries = content if isinstance(content, list) else [content]
    return [_cleaned_object(entry, 0) for entry in entries if isinstance(entry, dict)]


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


def _cleaned_object(value: dict[str, Any], depth: int) -> dict[str, Any]:
    items = list(value.items())[:_MAX_ITEMS]
    return {_cleaned(name, depth): _cleaned(item, depth + 1) for name, item in items}


def _cleaned(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return printable(value[:_MAX_CHARACTERS].replace("\n", " "))
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return value if -_MAX_NUMBER < value < _MAX_NUMBER else None
    if depth > _MAX_DEPTH:
        return None
    if isinstance(value, dict):
        return _cleaned_object(value, depth)
    return [_cleaned(item, depth + 1) for item in value[:_MAX_ITEMS]]
