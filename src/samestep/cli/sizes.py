"""Sizes as people type them."""

from __future__ import annotations

import re

from samestep.errors import InputError

_UNITS = {"": 0, "k": 10, "m": 20, "g": 30, "t": 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", re.ASCII | re.IGNORECASE)


def size(option: str, text: str) -> int:
    """The bytes that `512MiB`, `1.5g` or `4096` stand for; KB is KiB.

    Args:
        option: whose value it is.

    Raises:
        InputError: it is no such size.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        raise InputError(f"{option} {text}", rule="a number of bytes, or one with KiB, MiB or GiB", do=f"{option} 1GiB")
    return int(float(found[1]) * (1 << _UNITS[found[2].lower()]))
