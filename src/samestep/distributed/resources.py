"""Processors and control group limits of this process, and the memory that its allocator keeps."""

from __future__ import annotations

import ctypes
import math
import os
from dataclasses import dataclass
from pathlib import Path

# Parameters of mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_KEPT_BYTES = 2**28
# The largest value of the threshold that glibc adapts. Larger blocks are mapped: in the heap they could fragment it.
_MAPPED_BYTES = 2**25


@dataclass(frozen=True)
class CgroupLimits:
    """Limits of the control groups of this process (cgroups(7), version 2); None without a limit."""

    memory_left: int | None = None  # bytes still available; cached files can be dropped and do not count as used
    cpus: float | None = None  # processor time in processors, such as 1.5


def read_cgroup_limits(root: Path = Path("/")) -> CgroupLimits:
    """Return the tightest limits on all levels of the hierarchy.

    Args:
        root: folder that contains `proc` and `sys`.
    """
    top = root / "sys" / "fs" / "cgroup"
    _, _, path = _text(root / "proc" / "self" / "cgroup").strip().rpartition("::")
    # In a container the path may be that of the host, with the container's own group mounted as the root.
    group = top / path.strip("/")
    groups = [folder for folder in (group, *group.parents) if folder.is_relative_to(top)]
    memory = [left for group in groups if (left := _memory_left(group)) is not None]
    cpus = [quota for group in groups if (quota := _cpus(group)) is not None]
    return CgroupLimits(memory_left=min(memory, default=None), cpus=min(cpus, default=None))


def _memory_left(group: Path) -> int | None:
    limit, used = _text(group / "memory.max").strip(), _text(group / "memory.current").strip()
    if not limit.isdecimal() or not used.isdecimal():
        return None  # `max`, or no such group
    stat = dict(line.split(" ", 1) for line in _text(group / "memory.stat").splitlines() if " " in line)
    files = sum(int(stat.get(name, "0")) for name in ("inactive_file", "active_file"))
    return max(0, int(limit) - max(0, int(used) - files))


def _cpus(group: Path) -> float | None:
    quota, _, period = _text(group / "cpu.max").strip().partition(" ")
    return int(quota) / int(period) if quota.isdecimal() and period.isdecimal() else None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""  # version 1 of control groups, or a group that is not visible here


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
