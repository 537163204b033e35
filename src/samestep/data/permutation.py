"""Orders of samples: of the dataset, a keyed permutation without memory per sample, and a random array."""

from __future__ import annotations

from typing import Protocol

import numpy
from numpy.typing import NDArray

from samestep.distributed.rng import derive_seed

Indices = NDArray[numpy.int64]

_ROUNDS = 8
_MIN_BITS = 8  # of a block; a network of fewer bits has few permutations


class Order(Protocol):
    """Sample indices of one epoch in the order of use: an array, or an object that computes slices."""

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

    It sorts random keys, the raw output of Philox (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011),
    which NumPy keeps stable between versions, unlike its `permutation`.
    """
    return numpy.argsort(numpy.random.Philox(key=seed).random_raw(size), kind="stable").astype(numpy.int64)


class KeyedPermutation:
    """Pseudo-random permutation of `range(size)` with constant memory at any position.

    A balanced Feistel network permutes blocks of an even number of bits (Luby and Rackoff, "How to construct
    pseudorandom permutations from pseudorandom functions", 1988). A result outside of the range is permuted again until
    it is inside (cycle walking: Black and Rogaway, "Ciphers with arbitrary finite domains", 2002). A block has fewer
    than four times as many values as the range, so a position takes fewer than four networks on average; a range below
    64 takes more. The round function adds a key and applies the mixing function of SplitMix64 (Steele et al., "Fast
    splittable pseudorandom number generators", 2014), in integer arithmetic modulo 2**64, which NumPy does not change
    between versions. The permutation has no cryptographic purpose.

    Args:
        size: number of indices, at least 0 and less than 2**63.
        seed: seed of the order.
        epoch: number of the epoch.
    """

    def __init__(self, size: int, *, seed: int, epoch: int) -> None:
        half = max(_MIN_BITS, (size - 1).bit_length() + 1) // 2
        self._size, self._half, self._mask = size, numpy.uint64(half), numpy.uint64((1 << half) - 1)
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
        left, right = blocks >> self._half, blocks & self._mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right + key) & self._mask)
        return (left << self._half) | right


def _mix(values: NDArray[numpy.uint64]) -> NDArray[numpy.uint64]:
    """Mix the bits of `values` in place."""
    values ^= values >> numpy.uint64(30)
    values *= numpy.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> numpy.uint64(27)
    values *= numpy.uint64(0x94D049BB133111EB)
    values ^= values >> numpy.uint64(31)
    return values
