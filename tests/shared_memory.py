"""What programs have left in the system's shared memory."""

import re
from pathlib import Path

_ROOT = Path("/dev/shm")


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
