"""Order of the samples of an epoch, and its batches.

The order is that of the data set, a shuffle, or groups of similar length: a function of numbers
alone, such as seed and epoch.

Decisions: docs/decisions/data.md
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from numpy.typing import NDArray

from samestep.cursor import Cursor, require_position
from samestep.data.loader_arguments import require_compatible, require_integer
from samestep.data.sample_reader import set_epoch
from samestep.distributed.rng import derive_seed
from samestep.errors import DataError, InputError

Indices = NDArray[numpy.int64]

# Global batches per window of samples that are sorted by length together. A large window gives
# batches of nearly equal length; at least some windows per epoch keep the samples of a batch
# different from epoch to epoch.
_MAX_BATCHES_PER_WINDOW = 50
_MIN_WINDOWS = 4


class EpochOrder(torch.utils.data.Sampler[list[int]]):
    """Batch sampler that yields the batches from a cursor to the end of its epoch.

    Attributes:
        batch_size: samples of a batch; the last one of an epoch can have fewer.
        cursor: position of the next iteration.
        seed: seed of the order.

    Args:
        dataset: map-style data set.
        options: arguments of `samestep.loader` that define the order.

    Raises:
        InputError: a number is invalid, or arguments do not fit together.
        DataError: the data set is empty.
    """

    def __init__(self, dataset: Any, options: Mapping[str, Any]) -> None:
        require_compatible(dataset, options)
        self._dataset = dataset
        if options["generator"] is not None:
            # Not the state: earlier draws of the generator must not change the order.
            self.seed = options["generator"].initial_seed()
        else:
            seed = options["seed"] or 0
            self.seed = require_integer("seed", seed, at_least=0, at_most=2**64 - 1, example=0)
        size = options["batch_size"]
        self.batch_size = require_integer("batch_size", size, at_least=1, example=64)
        self._shuffle = bool(options["shuffle"])
        self._drop_last = bool(options["drop_last"])
        lengths: Sequence[int] | None = options["lengths"]
        self._lengths: Indices | None = None
        content = b""  # of lengths, of which checkpoints contain a hash alone
        if lengths is not None:
            self._lengths = numpy.asarray(lengths, dtype=numpy.int64)
            content = self._lengths.tobytes()
        self._digest_of_lengths = hashlib.blake2b(content, digest_size=4).hexdigest()
        self._samples = 0
        self._sizes = (-1, -1)  # epoch and length of the data set for which `_samples` holds
        self.cursor = Cursor()
        self.samples_of(0)

    def samples_of(self, epoch: int) -> int:
        """Return the number of samples of an epoch, without those that `drop_last` leaves out."""
        if (epoch, len(self._dataset)) != self._sizes:
            # The length can depend on the epoch.
            set_epoch(self._dataset, self.seed, epoch)
            samples = len(self._dataset)
            self._require_samples(samples)
            if self._drop_last:
                samples -= samples % self.batch_size
            self._samples = samples
            self._sizes = (epoch, len(self._dataset))
        return self._samples

    def _require_samples(self, samples: int) -> None:
        if samples == 0:
            raise DataError(
                "the dataset is empty",
                expected="at least one sample",
                fix="check the path and the filters",
                code="E_DATA",
            )
        if self._drop_last and samples < self.batch_size:
            raise DataError(
                f"the dataset has {samples} samples, fewer than one batch of {self.batch_size}, "
                "and drop_last is set",
                expected="at least one complete batch",
                fix=f"batch_size={samples} or less, or leave drop_last out",
                code="E_DATA",
            )
        if self._lengths is not None and len(self._lengths) != samples:
            raise InputError(
                f"there are {len(self._lengths)} lengths for {samples} samples",
                "one length per sample",
                "pass lengths in the order of the dataset",
                code="E_LOADER",
            )

    def settings_of(self, epoch: int) -> dict[str, int | str]:
        """Return the settings on which the batches of an epoch depend; checkpoints contain them."""
        return {
            "samples": self.samples_of(epoch),
            # The shuffle is of all samples, also those that `drop_last` leaves out.
            "dataset": len(self._dataset),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self._shuffle,
            "lengths": self._digest_of_lengths,
        }

    def order(self, epoch: int) -> Indices | range:
        """Return the samples of an epoch in the order of use, also those `drop_last` leaves out."""
        set_epoch(self._dataset, self.seed, epoch)
        size = len(self._dataset)
        if self._shuffle and self._lengths is not None:
            return grouped_order(self._lengths, self.batch_size, seed=self.seed, epoch=epoch)
        if self._shuffle:
            return shuffled_order(size, seed=self.seed, epoch=epoch)
        if self._lengths is not None:
            # Stable: by default, the order of equal lengths depends on the processor.
            return numpy.argsort(self._lengths, kind="stable")
        return range(size)

    def __len__(self) -> int:
        """Number of batches of the epoch of the cursor."""
        return (self.samples_of(self.cursor.epoch) + self.batch_size - 1) // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        begin = self.cursor
        order = self.order(begin.epoch)
        samples = self.samples_of(begin.epoch)
        require_position(begin, samples, self.batch_size)
        for start in range(begin.samples, samples, self.batch_size):
            batch = order[start : min(start + self.batch_size, samples)]
            # Python's integers, as those of torch's samplers.
            yield numpy.asarray(batch).tolist()


def _random_order(size: int, seed: int) -> Indices:
    """Return a random permutation of `range(size)`.

    It sorts random keys, the raw output of Philox (Salmon et al., "Parallel random numbers: as easy
    as 1, 2, 3", 2011), which NumPy keeps stable between versions, unlike its `permutation`.
    """
    keys = numpy.random.Philox(key=seed).random_raw(size)
    return numpy.argsort(keys, kind="stable").astype(numpy.int64)


def shuffled_order(size: int, *, seed: int, epoch: int) -> Indices:
    """Return the sample indices of one epoch in random order, length `size`."""
    return _random_order(size, derive_seed("order", seed, epoch))


def grouped_order(lengths: Indices, batch_size: int, *, seed: int, epoch: int) -> Indices:
    """Return the sample indices of one epoch, with samples of similar length in one global batch.

    Windows of several global batches of `shuffled_order` are sorted by length and cut into batches;
    the batches are then shuffled. Samples that do not fill a batch are separated before sorting.
    """
    order = shuffled_order(len(lengths), seed=seed, epoch=epoch)
    batches = len(order) // batch_size
    complete = order[: batches * batch_size]
    rest = order[batches * batch_size :]
    batches_per_window = min(_MAX_BATCHES_PER_WINDOW, max(1, batches // _MIN_WINDOWS))
    window = numpy.arange(len(complete)) // (batches_per_window * batch_size)
    # The last key of `lexsort` counts first.
    rows = complete[numpy.lexsort((lengths[complete], window))].reshape(batches, batch_size)
    # With the batch size, the seed is another one than that of the samples.
    rows = rows[_random_order(batches, derive_seed("order", seed, epoch, batch_size))]
    # Samples stay sorted within a batch, because each microbatch is padded separately.
    return numpy.concatenate([rows.reshape(-1), rest[numpy.argsort(lengths[rest], kind="stable")]])
