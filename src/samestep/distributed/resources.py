"""Processors and control group limits of this process, and the memory that its allocator keeps."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

# Version 1 of control groups writes a number near 2^63 for "no limit".
_NO_LIMIT = 1 << 60
# Parameters of mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_KEPT_BYTES = 2**28
# The largest value of the threshold that glibc adapts. Larger blocks are mapped: in the heap they could fragment it.
_MAPPED_BYTES = 2**25
T = TypeVar("T", int, float)


@dataclass(frozen=True)
class CgroupLimits:
    """Limits of the control groups of this process (cgroups(7)); None without a limit."""

    memory: int | None = None  # bytes of memory for the whole group
    memory_left: int | None = None  # bytes still available; cached files can be dropped and do not count as used
    cpus: float | None = None  # processor time in processors, such as 1.5


def read_cgroup_limits(root: Path = Path("/")) -> CgroupLimits:
    """Return the tightest limits on all levels of the hierarchy, in version 1 and 2.

    Args:
        root: folder that contains `proc` and `sys`.
    """

    def tightest(controller: str, read: Callable[[Path], T | None]) -> T | None:
        return min((value for group in _groups(root, controller) if (value := read(group)) is not None), default=None)

    return CgroupLimits(
        memory=tightest("memory", _memory_limit),
        memory_left=tightest("memory", _memory_left),
        cpus=tightest("cpu", _cpus),
    )


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of a controller, from the group of this process up."""
    mounts = root / "sys" / "fs" / "cgroup"
    for line in _text(root / "proc" / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        top = mounts / controller if controllers else mounts
        if not controllers and (mounts / "unified").is_dir():
            top = mounts / "unified"
        folder = top / path.strip("/")
        # In a container the path may be that of the host, with the container's own group mounted as the root.
        while folder != top and folder.is_dir():
            yield folder
            folder = folder.parent
        yield top


def _memory_limit(group: Path) -> int | None:
    limit = _number(group / "memory.max")
    return _number(group / "memory.limit_in_bytes") if limit is None else limit


def _memory_left(group: Path) -> int | None:
    limit = _memory_limit(group)
    used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes")
    if limit is None or used is None:
        return None
    stat = dict(line.split(" ", 1) for line in _text(group / "memory.stat").splitlines() if " " in line)
    files = sum(
        int(stat.get(f"total_{name}", stat.get(name, "0")))  # `total_`: version 1, including child groups
        for name in ("inactive_file", "active_file")
    )
    return max(0, limit - max(0, used - files))


def _cpus(group: Path) -> float | None:
    quota, _, period = _text(group / "cpu.max").strip().partition(" ")
    if not quota:
        quota, period = (_text(group / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period"))
    if not (quota.isdecimal() and period.isdecimal()) or period == "0":
        return None  # `max`, -1, or nothing
    return int(quota) / int(period)


def _number(path: Path) -> int | None:
    text = _text(path)
    number = int(text) if text.strip().isdecimal() else None
    return None if number is None or number >= _NO_LIMIT else number


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""  # another version of control groups, or a group that is not visible here


@dataclass(frozen=True)
class Processors:
    """Number of processors."""

    online: int  # processors of the machine
    allowed: int  # processors in the affinity mask of this process
    quota: float | None = None  # processor time of the control group in processors; None without a limit

    @property
    def usable(self) -> int:
        """Processors that can compute at the same time; at least 1."""
        return max(1, min(self.allowed, math.floor(self.quota) if self.quota is not None else self.allowed))


def read_processors() -> Processors:
    """Return the processors of this process."""
    online = os.cpu_count() or 1
    # macOS has no affinity.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else online
    return Processors(online, allowed, read_cgroup_limits().cpus)


def keep_freed_memory() -> bool:
    """Let the process keep 256 MiB of freed memory for all threads; return whether the C library accepted it.

    Each step allocates and frees tensors of equal sizes. With its defaults, glibc returns their memory to the system,
    which fills it with zeros again, page by page: up to a tenth of a step. Threads that start later use one heap: with
    heaps of their own, memory that one thread has freed would not serve another one.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries lack it
    return mallopt is not None and bool(
        mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES) and mallopt(_TRIM_THRESHOLD, _KEPT_BYTES) and mallopt(_ARENA_MAX, 1)
    )
