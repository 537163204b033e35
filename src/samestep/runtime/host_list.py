"""Slurm's compressed lists of hosts."""

from __future__ import annotations

import math
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


def count_hosts(hosts: str) -> int:
    """The number of hosts in a list such as `gpu[003-006,9],login1`: 6.

    Raises:
        InputError: it is no such list.
    """
    count, rest = 0, hosts
    while rest:
        name = _NAME.match(rest)
        if name is None or rest[name.end() : name.end() + 1] not in ("", ","):
            raise _unreadable(hosts)
        count += math.prod(_width(ranges, hosts) for ranges in _RANGES.findall(name[0]))
        rest = rest[name.end() + 1 :]
    return count


def _width(ranges: str, hosts: str) -> int:
    """How many numbers `003-006,9` stands for."""
    if _FIRST_NUMBER.fullmatch(ranges) is None:
        raise _unreadable(hosts)
    ends = [part.split("-") for part in ranges.split(",")]
    return sum(int(end[-1]) - int(end[0]) + 1 for end in ends)


def _unreadable(hosts: str) -> InputError:
    return InputError(
        f"the list of hosts {hosts!r} cannot be read",
        rule="names with commas between, and numbers and ranges in brackets, such as gpu[003-006,9],login1",
        do="set MASTER_ADDR to the host of rank 0, and MASTER_PORT",
    )
