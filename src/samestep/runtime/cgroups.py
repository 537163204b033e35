"""What the control groups of this process allow (cgroups(7)), in version 1 and 2, on every level up to the root."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# Version 1 writes a number near 2^63 for no limit.
_NO_LIMIT = 1 << 60


@dataclass(frozen=True)
class ControlGroups:
    """Limits; None where there is none.

    Attributes:
        memory: bytes that all of the group may hold.
        memory_left: bytes that it may still take; what it holds of files can be dropped and does not count.
        cpus: processors' worth of time, such as 1.5.
        tasks_left: processes and threads that it may still start.
    """

    memory: int | None = None
    memory_left: int | None = None
    cpus: float | None = None
    tasks_left: int | None = None


def read_control_groups(root: Path = Path("/")) -> ControlGroups:
    """Those of this process.

    Args:
        root: where `proc` and `sys` lie.
    """
    memory = list(_groups(root, "memory"))
    limits = [limit for group in memory if (limit := _first(group, "memory.max", "memory.limit_in_bytes")) is not None]
    left = [room for group in memory if (room := _memory_left(group)) is not None]
    cpus = [share for group in _groups(root, "cpu") if (share := _cpus(group)) is not None]
    tasks = [room for group in _groups(root, "pids") if (room := _tasks_left(group)) is not None]
    return ControlGroups(
        memory=min(limits, default=None),
        memory_left=min(left, default=None),
        cpus=min(cpus, default=None),
        tasks_left=min(tasks, default=None),
    )


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The folders of a controller, from this process' own group up."""
    mounts = root / "sys" / "fs" / "cgroup"
    for line in _text(root / "proc" / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = mounts / controller if controllers else mounts
        if not controllers and (mounts / "unified").is_dir():
            top = mounts / "unified"
        # In a container the path may be the host's, and its own group is mounted as the root.
        own = top / path.strip("/")
        folder = own if own.is_dir() else top
        while True:
            yield folder
            if folder == top:
                break
            folder = folder.parent


def _memory_left(group: Path) -> int | None:
    limit = _first(group, "memory.max", "memory.limit_in_bytes")
    held = _number(_text(group / "memory.current")) or _number(_text(group / "memory.usage_in_bytes"))
    if limit is None or held is None:
        return None
    kept = dict(line.split(" ", 1) for line in _text(group / "memory.stat").splitlines() if " " in line)
    files = sum(
        int(kept.get(f"total_{name}", kept.get(name, "0")))  # `total_`: version 1, with the groups below
        for name in ("inactive_file", "active_file")
    )
    return max(0, limit - max(0, held - files))


def _cpus(group: Path) -> float | None:
    quota, _, period = _text(group / "cpu.max").strip().partition(" ")
    if not quota:
        quota, period = (_text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    if not (quota.isdecimal() and period.isdecimal()) or period == "0":
        return None  # `max`, -1, or nothing
    return int(quota) / int(period)


def _tasks_left(group: Path) -> int | None:
    limit, held = _number(_text(group / "pids.max")), _number(_text(group / "pids.current"))
    return None if limit is None or held is None else max(0, limit - held)


def _first(group: Path, *names: str) -> int | None:
    return next((number for name in names if (number := _number(_text(group / name))) is not None), None)


def _number(text: str) -> int | None:
    found = int(text) if text.strip().isdecimal() else None
    return None if found is None or found >= _NO_LIMIT else found


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""  # not this version, or a group that is not shown here
