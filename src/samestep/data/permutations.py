"""Permutations of sample indices, computed from numbers alone: seed, epoch, size and lengths.

They are the order of the dataset, a shuffled array, and groups of similar length. `epoch_order.py`
selects one for a loader.

Decisions: docs/decisions/data.md
"""

from __future__ import annotations

import numpy
from numpy.typing import NDArray

from samestep.distributed.rng import derive_seed

Indices = NDArray[numpy.int64]
Order = Indices | range  # sample indices of an epoch in the order of use

# Global batches per window of samples that are sorted by length together. A large window gives
# batches of nearly equal length; at least some windows per epoch keep the samples of a batch
# different from epoch to epoch.
_MAX_BATCHES_PER_WINDOW = 50
_MIN_WINDOWS = 4


def random_order(size: int, seed: int) -> Indices:
    """Return a random permutation of `range(size)`.

    It sorts random keys, the raw output of Philox (Salmon et al., "Parallel random numbers: as easy
    as 1, 2, 3", 2011), which NumPy keeps stable between versions, unlike its `permutation`.
    """
    keys = numpy.random.Philox(key=seed).random_raw(size)
    return numpy.argsort(keys, kind="stable").astype(numpy.int64)


def global_order(size: int, *, seed: int, epoch: int, shuffle: bool) -> Order:
    """Return the sample indices of one epoch in the order of use, length `size`."""
    if not shuffle:
        return range(size)
    return random_order(size, derive_seed("order", seed, epoch))


def grouped_order(
    lengths: Indices, batch_size: int, *, seed: int, epoch: int, shuffle: bool
) -> Indices:
    """Return the sample indices of one epoch, with samples of similar length in one global batch.

    Windows of several global batches of `global_order` are sorted by length and cut into batches;
    the batches are then shuffled. Samples that do not fill a batch are separated before sorting.
    Without `shuffle`, all samples are sorted.
    """
    if not shuffle:
        return numpy.argsort(lengths, kind="stable")
    order = random_order(len(lengths), derive_seed("order", seed, epoch))
    batches = len(order) // batch_size
    complete = order[: batches * batch_size]
    rest = order[batches * batch_size :]
    batches_per_window = min(_MAX_BATCHES_PER_WINDOW, max(1, batches // _MIN_WINDOWS))
    window = numpy.arange(len(complete)) // (batches_per_window * batch_size)
    rows = complete[numpy.lexsort((lengths[complete], window))].reshape(batches, batch_size)
    rows = rows[random_order(batches, derive_seed("order", seed, epoch, batch_size))]
    # Samples stay sorted within a batch, because each microbatch is padded separately.
    return numpy.concatenate([rows.reshape(-1), rest[numpy.argsort(lengths[rest], kind="stable")]])
