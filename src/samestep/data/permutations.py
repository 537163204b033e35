"""Permutations of sample indices, computed from numbers alone: seed, epoch, size and lengths.

They are the order of the dataset, a shuffled array, a keyed permutation without memory per sample,
and groups of similar length. `epoch_order.py` selects one for a loader.

Decisions: docs/decisions/data.md
"""

from __future__ import annotations

from typing import Literal, Protocol

import numpy
from numpy.typing import NDArray

from samestep.config import SampleOrder
from samestep.distributed.rng import derive_seed

Indices = NDArray[numpy.int64]

_ROUNDS = 8
_MIN_BITS = 8  # of a block; a network of fewer bits has few permutations
# `auto` is `keyed` for more samples, of which `shuffled` takes seconds and hundreds of MB an epoch.
KEYED_ABOVE = 10_000_000
# Global batches per window of samples that are sorted by length together. A large window gives
# batches of nearly equal length; at least some windows per epoch keep the samples of a batch
# different from epoch to epoch.
_MAX_BATCHES_PER_WINDOW = 50
_MIN_WINDOWS = 4


class Order(Protocol):
    """Sample indices of an epoch in the order of use: an array, or an object with slices."""

    def __len__(self) -> int: ...

    def __getitem__(self, positions: slice, /) -> Indices: ...


class DatasetOrder:
    """Order of the dataset: indices 0 to `size - 1`."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, positions: slice, /) -> Indices:
        return numpy.arange(*positions.indices(self._size), dtype=numpy.int64)


def random_order(size: int, seed: int) -> Indices:
    """Return a random permutation of `range(size)`.

    It sorts random keys, the raw output of Philox (Salmon et al., "Parallel random numbers: as easy
    as 1, 2, 3", 2011), which NumPy keeps stable between versions, unlike its `permutation`.
    """
    keys = numpy.random.Philox(key=seed).random_raw(size)
    return numpy.argsort(keys, kind="stable").astype(numpy.int64)


class KeyedPermutation:
    """Pseudo-random permutation of `range(size)` with constant memory at any position.

    A balanced Feistel network permutes blocks of an even number of bits (Luby and Rackoff, 1988). A
    result outside of the range is permuted again until it is inside (cycle walking: Black and
    Rogaway, "Ciphers with arbitrary finite domains", 2002). The round function adds a key and mixes
    as SplitMix64 (Steele et al., 2014), in integer arithmetic modulo 2**64. The permutation has no
    cryptographic purpose.

    Args:
        size: number of indices, at least 0 and less than 2**63.
        seed: seed of the order.
        epoch: number of the epoch.
    """

    def __init__(self, size: int, *, seed: int, epoch: int) -> None:
        half = max(_MIN_BITS, (size - 1).bit_length() + 1) // 2
        self._size = size
        self._half = numpy.uint64(half)
        self._mask = numpy.uint64((1 << half) - 1)
        keys = [derive_seed("keyed order", seed, epoch, size, number) for number in range(_ROUNDS)]
        self._keys = [numpy.uint64(key) for key in keys]

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, positions: slice, /) -> Indices:
        """Return the indices at positions, shape of the slice."""
        result = numpy.arange(*positions.indices(self._size), dtype=numpy.uint64)
        outside = numpy.arange(len(result))
        while len(outside):
            values = self._permuted(result[outside])
            result[outside] = values
            outside = outside[values >= numpy.uint64(self._size)]
        return result.astype(numpy.int64)

    def _permuted(self, blocks: NDArray[numpy.uint64]) -> NDArray[numpy.uint64]:
        left = blocks >> self._half
        right = blocks & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right + key) & self._mask)
        return (left << self._half) | right


def _mix(values: NDArray[numpy.uint64]) -> NDArray[numpy.uint64]:
    values ^= values >> numpy.uint64(30)
    values *= numpy.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> numpy.uint64(27)
    values *= numpy.uint64(0x94D049BB133111EB)
    values ^= values >> numpy.uint64(31)
    return values


def resolve_order(order: SampleOrder, size: int) -> Literal["shuffled", "keyed"]:
    """Return the kind of order of `size` samples."""
    if order == "auto":
        if size > KEYED_ABOVE:
            return "keyed"
        return "shuffled"
    return order


def global_order(
    size: int, *, seed: int, epoch: int, shuffle: bool, order: SampleOrder = "shuffled"
) -> Order:
    """Return the sample indices of one epoch in the order of use, length `size`.

    The order `shuffled` is an array. The order `keyed` computes the indices of a slice.
    """
    if not shuffle:
        return DatasetOrder(size)
    if resolve_order(order, size) == "keyed":
        return KeyedPermutation(size, seed=seed, epoch=epoch)
    return random_order(size, derive_seed("order", seed, epoch))


def grouped_order(
    lengths: Indices, batch_size: int, *, seed: int, epoch: int, shuffle: bool
) -> Indices:
    """Return the sample indices of one epoch, with samples of similar length in one global batch.

    Windows of several global batches of `global_order` are sorted by length and cut into batches;
    the batches are then shuffled. Samples that do not fill a batch are separated before sorting.
    Without `shuffle`, all samples are sorted.
    """
    order = global_order(len(lengths), seed=seed, epoch=epoch, shuffle=shuffle)[:]
    if not shuffle:
        return order[numpy.argsort(lengths, kind="stable")]
    batches = len(order) // batch_size
    complete = order[: batches * batch_size]
    rest = order[batches * batch_size :]
    batches_per_window = min(_MAX_BATCHES_PER_WINDOW, max(1, batches // _MIN_WINDOWS))
    window = numpy.arange(len(complete)) // (batches_per_window * batch_size)
    rows = complete[numpy.lexsort((lengths[complete], window))].reshape(batches, batch_size)
    rows = rows[random_order(batches, derive_seed("order", seed, epoch, batch_size))]
    # Samples stay sorted within a batch, because each microbatch is padded separately.
    return numpy.concatenate([rows.reshape(-1), rest[numpy.argsort(lengths[rest], kind="stable")]])
