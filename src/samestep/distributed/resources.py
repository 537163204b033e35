"""Usable processors of this process, and the memory that its allocator keeps."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

# Parameters of mallopt(3).
_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
_ARENA_MAX = -8
_KEPT_BYTES = 2**28
# The largest value of the threshold that glibc adapts. Larger blocks are mapped: in the heap they
# could fragment it.
_MAPPED_BYTES = 2**25


def usable_processors(root: Path = Path("/")) -> int:
    """Return the number of processors that can compute at the same time for this process, at least 1.

    They are limited by the affinity mask and by the control groups on all levels (cgroups(7),
    version 2).

    Args:
        root: folder that contains `proc` and `sys`.
    """
    # macOS has no affinity.
    allowed = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    top = root / "sys" / "fs" / "cgroup"
    _, _, path = _text(root / "proc" / "self" / "cgroup").strip().rpartition("::")
    # In a container the path may be that of the host, with the container's own group mounted as the
    # root.
    group = top / path.strip("/")
    for folder in (group, *group.parents):
        quota, _, period = _text(folder / "cpu.max").strip().partition(" ")
        if quota.isdecimal() and period.isdecimal():
            allowed = min(allowed, int(quota) // int(period))
    return max(1, allowed)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""  # version 1 of control groups, or a group that is not visible here


def keep_freed_memory() -> bool:
    """Let the process keep 256 MiB of freed memory for all threads; return whether the C library accepted it.

    Each step allocates and frees tensors of equal sizes. With its defaults, glibc returns their
    memory to the system,
    which fills it with zeros again, page by page: up to a tenth of a step. Threads that start later
        use one heap: with
    heaps of their own, memory that one thread has freed would not serve another one.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries lack it
    return mallopt is not None and bool(
        mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES)
        and mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        and mallopt(_ARENA_MAX, 1)
    )
