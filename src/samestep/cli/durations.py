"""Times as people type them."""

from __future__ import annotations

import re

from samestep.errors import InputError

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)([smh]?)", re.ASCII)


def seconds(option: str, text: str) -> float:
    """The seconds that `30`, `30s`, `1.5m` or `2h` stand for.

    Args:
        option: whose value it is.

    Raises:
        InputError: it is no such time, or none at all.
    """
    found = _DURATION.fullmatch(text)
    value = float(found[1]) * _UNITS[found[2]] if found else 0.0
    if not 0 < value < float("inf"):
        raise InputError(
            f"{option} {text}", rule="a time above 0: a number of seconds, or one with s, m or h", do=f"{option} 30s"
        )
    return value
