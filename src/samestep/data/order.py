"""The order of data: a pure function of (seed, epoch), and of lengths where samples are grouped by them."""

from __future__ import annotations

import numpy
from numpy.typing import NDArray

from samestep.runtime.random_state import derive_seed

Indices = NDArray[numpy.int64]

# Global batches that are sorted by length together: many, so that a batch is of nearly one length, and yet a part of
# the epoch only, so that which samples meet in a batch differs from epoch to epoch.
_MOST_IN_WINDOW, _LEAST_WINDOWS = 50, 4


def global_order(size: int, *, seed: int, epoch: int, shuffle: bool) -> Indices:
    """All sample indices of one epoch in the order in which they are used.

    Sample `i` goes to the place of the `i`-th of `size` random keys when these are sorted. The keys are the raw
    output of Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), which NumPy keeps the
    same between versions, unlike its `permutation`.
    """
    if not shuffle:
        return numpy.arange(size, dtype=numpy.int64)
    return _by_keys(size, derive_seed("order", seed, epoch))


def grouped_order(lengths: Indices, batch_size: int, *, seed: int, epoch: int, shuffle: bool) -> Indices:
    """All sample indices of one epoch, samples of like length in one global batch, so that little is padded.

    Windows of some global batches of `global_order` are sorted by length each and cut into batches, whose order is
    drawn again. The samples that do not fill a batch are set apart before anything is sorted, so that the last batch
    is no shorter or longer than others. Without `shuffle` the whole is sorted. Ranks have no part in any of this.
    """
    order = global_order(len(lengths), seed=seed, epoch=epoch, shuffle=shuffle)
    if not shuffle:
        return order[numpy.argsort(lengths, kind="stable")]
    batches = len(order) // batch_size
    whole, rest = order[: batches * batch_size], order[batches * batch_size :]
    in_window = min(_MOST_IN_WINDOW, max(1, batches // _LEAST_WINDOWS))
    window = numpy.arange(len(whole)) // (in_window * batch_size)
    rows = whole[numpy.lexsort((lengths[whole], window))].reshape(batches, batch_size)
    rows = rows[_by_keys(batches, derive_seed("order", seed, epoch, batch_size))]
    # In a batch too samples are sorted, because each of its shards is padded on its own.
    return numpy.concatenate([rows.reshape(-1), rest[numpy.argsort(lengths[rest], kind="stable")]])


def _by_keys(size: int, seed: int) -> Indices:
    """The numbers below `size` in an order drawn from `seed`."""
    return numpy.argsort(numpy.random.Philox(key=seed).random_raw(size), kind="stable").astype(numpy.int64)
