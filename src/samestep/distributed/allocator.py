"""Thresholds of the C library's memory allocator."""

from __future__ import annotations

import ctypes

# Parameters of mallopt(3).
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
_KEPT_BYTES = 2**28
# The largest value of the threshold that glibc adapts. Larger blocks are mapped: in the heap they could fragment it.
_MAPPED_BYTES = 2**25


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
