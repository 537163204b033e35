"""The order of data: a pure function of (seed, epoch)."""

from __future__ import annotations

import numpy
from numpy.typing import NDArray

from samestep.runtime.random_state import derive_seed

Indices = NDArray[numpy.int64]


def global_order(size: int, *, seed: int, epoch: int, shuffle: bool) -> Indices:
    """All sample indices of one epoch in the order in which they are used.

    Sample `i` goes to the place of the `i`-th of `size` random keys when these are sorted. The keys are the raw
    output of Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), which NumPy keeps the
    same between versions, unlike its `permutation`.
    """
    if not shuffle:
        return numpy.arange(size, dtype=numpy.int64)
    keys = numpy.random.Philox(key=derive_seed("order", seed, epoch)).random_raw(size)
    return numpy.argsort(keys, kind="stable").astype(numpy.int64)
