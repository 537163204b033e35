"""Bytes, durations and counts as text for users."""

from __future__ import annotations

import re

from samestep.errors import InputError

_DURATION_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smh]?)", re.ASCII)


def format_bytes(value: float) -> str:
    """Return bytes with a binary unit and three significant digits: `64 MiB`, `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1024 or unit == "TiB":
            break
        value /= 1024
    if unit == "B" or abs(value) >= 100:
        return f"{value:,.0f} {unit}"
    return f"{value:.3g} {unit}"


def parse_duration(option: str, text: str) -> float:
    """Return the seconds of the text `30`, `30s`, `1.5m` or `2h` of a command-line option.

    Raises:
        InputError: `text` is not a duration above 0.
    """
    value = 0.0
    if match := _DURATION.fullmatch(text):
        value = float(match[1]) * _DURATION_UNITS[match[2]]
    if not 0 < value < float("inf"):
        raise InputError(
            f"{option} {text}",
            expected="a duration above 0: a number of seconds, or one with s, m or h",
            fix=f"{option} 30s",
            code="E_VALUE",
        )
    return value


def format_milliseconds(seconds: float) -> str:
    """Return seconds as milliseconds: `1,234 ms`, `12.3 ms`, `0.12 ms`."""
    value = seconds * 1e3
    if value >= 100:
        return f"{value:,.0f} ms"
    if value >= 1:
        return f"{value:.1f} ms"
    return f"{value:.2f} ms"


def plural(number: int, noun: str) -> str:
    """Return a number with its noun: `1 rank`, `2 ranks`, `2 processes`, `2 microbatches`."""
    if number == 1:
        return f"1 {noun}"
    # `batches` and `processes`, but `epochs`.
    ending = "es" if noun.endswith(("s", "tch")) else "s"
    return f"{number} {noun}{ending}"
