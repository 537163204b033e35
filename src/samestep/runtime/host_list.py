"""Slurm's compressed lists of hosts."""

from __future__ import annotations

import re

from samestep.errors import InputError

# One name: parts outside of brackets, and bracketed lists of numbers and ranges.
_NAME = re.compile(r"(?:[^\[\],\s]+|\[[^\[\]\s]+\])+")
_RANGES = re.compile(r"\[([^\[\]]+)\]")
_FIRST_NUMBER = re.compile(r"(\d+)(?:-\d+)?(?:,\d+(?:-\d+)?)*")


def first_host(hosts: str) -> str:
    """The first host of a list such as `gpu[003-006,9],login1`: `gpu003`.

    Raises:
        InputError: it is no such list.
    """
    name = _NAME.match(hosts)
    if name is None or hosts[name.end() : name.end() + 1] not in ("", ","):
        raise _unreadable(hosts)

    def first(ranges: re.Match[str]) -> str:
        number = _FIRST_NUMBER.fullmatch(ranges[1])
        if number is None:
            raise _unreadable(hosts)
        return number[1]

    return _RANGES.sub(first, name[0])


def _unreadable(hosts: str) -> InputError:
    return InputError(
        f"the list of hosts {hosts!r} cannot be read",
        rule="names with commas between, and numbers and ranges in brackets, such as gpu[003-006,9],login1",
        do="set MASTER_ADDR to the host of rank 0, and MASTER_PORT",
    )
