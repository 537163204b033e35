"""Thresholds of the C library's memory allocator."""

from __future__ import annotations

import ctypes

# Parameters of mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_BYTES = 2**30
_LARGEST_MMAP_THRESHOLD = 2**25  # of glibc before 2.35


def keep_freed_memory() -> bool:
    """Let the process keep freed memory of up to 1 GiB for its next allocations; return whether glibc accepted it.

    Each step allocates and frees tensors of equal sizes. With its defaults, glibc returns their memory to the system,
    which fills it with zeros again, page by page: up to a tenth of a step.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries lack it
    if mallopt is None:
        return False
    is_set = mallopt(_MMAP_THRESHOLD, _BYTES) or mallopt(_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    return bool(is_set and mallopt(_TRIM_THRESHOLD, _BYTES))
