"""Global order of samples: a pure function of (seed, epoch), and of lengths if samples are grouped by length."""

from __future__ import annotations

import numpy
from numpy.typing import NDArray

from samestep.distributed.rng import derive_seed

Indices = NDArray[numpy.int64]

# Global batches per window of samples that are sorted by length together. A large window gives batches of nearly equal
# length; at least some windows per epoch keep the samples of a batch different from epoch to epoch.
_MAX_BATCHES_PER_WINDOW, _MIN_WINDOWS = 50, 4


def global_order(size: int, *, seed: int, epoch: int, shuffle: bool) -> Indices:
    """Return the sample indices of one epoch in the order of use, shape `(size,)`.

    Shuffling sorts `size` random keys. The keys are the raw output of Philox (Salmon et al., "Parallel random numbers:
    as easy as 1, 2, 3", 2011), which NumPy keeps stable between versions, unlike its `permutation`.
    """
    if not shuffle:
        return numpy.arange(size, dtype=numpy.int64)
    return _random_order(size, derive_seed("order", seed, epoch))


def grouped_order(lengths: Indices, batch_size: int, *, seed: int, epoch: int, shuffle: bool) -> Indices:
    """Return the sample indices of one epoch with samples of similar length in one global batch, to reduce padding.

    Windows of several global batches of `global_order` are sorted by length and cut into batches; the batches are then
    shuffled. Samples that do not fill a batch are separated before sorting, so the last batch is not biased towards
    short or long samples. Without `shuffle`, all samples are sorted by length. `lengths` has one length per sample.
    """
    order = global_order(len(lengths), seed=seed, epoch=epoch, shuffle=shuffle)
    if not shuffle:
        return order[numpy.argsort(lengths, kind="stable")]
    batches = len(order) // batch_size
    complete, rest = order[: batches * batch_size], order[batches * batch_size :]
    batches_per_window = min(_MAX_BATCHES_PER_WINDOW, max(1, batches // _MIN_WINDOWS))
    window = numpy.arange(len(complete)) // (batches_per_window * batch_size)
    rows = complete[numpy.lexsort((lengths[complete], window))].reshape(batches, batch_size)
    rows = rows[_random_order(batches, derive_seed("order", seed, epoch, batch_size))]
    # Samples stay sorted within a batch, because each microbatch is padded separately.
    return numpy.concatenate([rows.reshape(-1), rest[numpy.argsort(lengths[rest], kind="stable")]])


def _random_order(size: int, seed: int) -> Indices:
    return numpy.argsort(numpy.random.Philox(key=seed).random_raw(size), kind="stable").astype(numpy.int64)
