"""Leftovers of programs in the system's shared memory."""

import re
from pathlib import Path

from helpers.system import until

_ROOT = Path("/dev/shm")


def require_none_left(before: set[str], timeout: float = 60) -> None:
    """Fail if something stays that was not there before.

    Memory of tests that run at the same time is removed later; abandoned memory stays.
    """
    until(lambda: abandoned() <= before, f"nothing is left in {_ROOT}", timeout, lambda: abandoned() - before)


def abandoned() -> set[str]:
    """Files there that no process has mapped: tests that run at the same time have their own."""
    there = {path.name for path in _ROOT.iterdir()}
    held: set[str] = set()
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                mapped = (process / "maps").read_text(encoding="utf-8", errors="replace")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            held |= set(re.findall(rf"{_ROOT}/(\S+)", mapped))
    return there - held
