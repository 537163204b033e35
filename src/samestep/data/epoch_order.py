"""Order of the samples of each epoch, as a function of (seed, epoch), and their division into batches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import numpy
import torch

from samestep.config import SampleOrder
from samestep.data.batch import digest_of
from samestep.data.order import (
    Indices,
    Order,
    global_order,
    grouped_order,
    repeats_of,
    resolve_order,
)
from samestep.data.sample_reader import set_epoch
from samestep.data.samplers import Sampler, draw, drawn_order
from samestep.data.streams.dataset import BatchSizes, StreamDataset
from samestep.errors import DataError, InputError
from samestep.microbatches import Cursor, require_integer, require_position

_EXCLUSIVE = {  # arguments that exclude others, as those of torch's DataLoader
    "sampler": ("shuffle", "lengths", "order"),
    "batch_sampler": ("sampler", "shuffle", "lengths", "batch_size", "drop_last", "order"),
    "generator": ("seed",),
    "lengths": ("order",),
}


class IndexBatch(list[int]):
    """Indices of one batch.

    Attributes:
        repeats: how often each index occurs before in the epoch; None for never.
    """

    repeats: list[int] | None = None


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
        self.seed = _seed(options)
        self._sampler: Sampler | None = options["sampler"]
        self._draws_batches = options["batch_sampler"] is not None
        batch_size = options["batch_size"]
        if self._draws_batches:
            self._sampler = options["batch_sampler"]
            first = next(iter(draw(options["batch_sampler"], dataset, seed=self.seed, epoch=0)), ())
            batch_size = len(first)
        self.batch_size = require_integer("batch_size", batch_size, at_least=1, example=64)
        self._shuffle = bool(options["shuffle"])
        self._drop_last = bool(options["drop_last"])
        lengths: Sequence[int] | None = options["lengths"]
        self._lengths = None if lengths is None else numpy.asarray(lengths, dtype=numpy.int64)
        order: SampleOrder = options["order"]
        self._kind: SampleOrder = order if self._shuffle and lengths is None else "shuffled"
        has_indices = self._sampler is not None or lengths is not None
        has_own_order = order == "auto" and not has_indices
        self._stream = dataset if isinstance(dataset, StreamDataset) and has_own_order else None
        self._sizes: tuple[tuple[int, int], int] = (
            (-1, -1),
            0,
        )  # of an epoch and a length of the data set
        self.cursor = Cursor()
        self.samples_of(0)

    def samples_of(self, epoch: int) -> int:
        """Return the number of samples of an epoch, without those that `drop_last` leaves out."""
        if (epoch, len(self._dataset)) != self._sizes[0]:
            set_epoch(self._dataset, self.seed, epoch)
            samples = len(self._dataset) if self._sampler is None else len(self._drawn(epoch))
            require_samples(samples, self.batch_size, self._lengths, drop_last=self._drop_last)
            samples -= samples % self.batch_size if self._drop_last else 0
            self._sizes = (epoch, len(self._dataset)), samples
        return self._sizes[1]

    def settings_of(self, epoch: int) -> dict[str, int | str]:
        """Return the settings on which the batches of an epoch depend; checkpoints contain them."""
        settings: dict[str, int | str] = {
            "samples": self.samples_of(epoch),
            "dataset": len(self._dataset),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self._shuffle,
            "order": resolve_order(self._kind, len(self._dataset)),
            "sampler": ""
            if self._sampler is None
            else digest_of(self.order(epoch)[: self.samples_of(epoch)]),
            "lengths": digest_of(self._lengths),
        }
        if self._stream is not None:
            settings |= self._stream.settings(shuffle=self._shuffle)
        return settings

    def adopt(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a checkpoint; without `order`, it is `shuffled`, and `auto` becomes `shuffled`."""
        if "order" not in settings and self._kind == "auto":
            self._kind = "shuffled"
        return {"order": "shuffled", **settings}

    def order(self, epoch: int) -> Order:
        """Return the samples of an epoch in the order of use, with those that `drop_last` leaves out."""
        set_epoch(self._dataset, self.seed, epoch)
        size = len(self._dataset)
        if self._stream is not None:
            sizes = BatchSizes(self.batch_size, 1, 1)
            return self._stream.order(sizes, seed=self.seed, epoch=epoch, shuffle=self._shuffle)
        if self._sampler is not None:
            return self._drawn(epoch)
        if self._lengths is not None:
            return grouped_order(
                self._lengths, self.batch_size, seed=self.seed, epoch=epoch, shuffle=self._shuffle
            )
        return global_order(
            size, seed=self.seed, epoch=epoch, shuffle=self._shuffle, order=self._kind
        )

    def _drawn(self, epoch: int) -> Indices:
        assert self._sampler is not None
        size = self.batch_size if self._draws_batches else None
        return drawn_order(
            self._sampler, self._dataset, seed=self.seed, epoch=epoch, batch_size=size
        )

    def __len__(self) -> int:
        """Number of batches of the epoch of the cursor."""
        return (self.samples_of(self.cursor.epoch) + self.batch_size - 1) // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        begin = self.cursor
        order = self.order(begin.epoch)
        samples = self.samples_of(begin.epoch)
        require_position(begin, samples, self.batch_size)
        repeats = repeats_of(order[:]) if self._sampler is not None else None
        for start in range(begin.samples, samples, self.batch_size):
            span = slice(start, min(start + self.batch_size, samples))
            batch = IndexBatch(order[span].tolist())
            if repeats is not None and repeats[span].any():
                batch.repeats = repeats[span].tolist()
            yield batch


def _seed(options: Mapping[str, Any]) -> int:
    generator: torch.Generator | None = options["generator"]
    if generator is not None:
        return generator.initial_seed()
    return require_integer("seed", options["seed"] or 0, at_least=0, at_most=2**64 - 1, example=0)


def require_compatible(dataset: Any, arguments: Mapping[str, Any]) -> None:
    """Require a dataset with an index, and arguments of a loader that fit together.

    Raises:
        InputError: the dataset is iterable only, there is no such order, or two arguments exclude
        each other.
    """
    order = arguments["order"]
    orders = get_args(SampleOrder)
    if order not in orders:
        problem = f"order of a loader is {order!r}"
        raise InputError(
            problem,
            f"one of {', '.join(orders)}",
            "leave out order, or order='auto'",
            code="E_VALUE",
        )
    if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__"):
        raise InputError(
            f"the dataset {type(dataset).__name__} has no length and index",
            "a dataset with __len__ and __getitem__: order, augmentation and resumption are functions of the index",
            "samestep.loader(list(dataset), ...) if the samples fit into memory, or an index of files and offsets",
            code="E_LOADER",
        )
    present = {
        name for name, value in arguments.items() if value is not None and value is not False
    }
    if order != "keyed":  # the order of lengths is `shuffled`
        present.discard("order")
    for one, others in _EXCLUSIVE.items():
        other = next((name for name in others if name in present), None)
        if one in present and other is not None:
            problem = f"{one} and {other} of a loader exclude each other"
            raise InputError(problem, "one of them", f"leave out {other}", code="E_LOADER")


def require_samples(
    samples: int, batch_size: int, lengths: Indices | None, *, drop_last: bool
) -> None:
    """Require samples in an epoch, and one length for each.

    Raises:
        DataError: there are no samples, or too few for a batch.
        InputError: the number of lengths is another one.
    """
    if samples == 0:
        raise DataError(
            "the dataset is empty",
            "at least one sample",
            "check the path and the filters",
            code="E_DATA",
        )
    if drop_last and samples < batch_size:
        raise DataError(
            f"the dataset has {samples} samples, fewer than one batch of {batch_size}, and drop_last is set",
            expected="at least one complete batch",
            fix=f"batch_size={samples} or less, or leave drop_last out",
            code="E_DATA",
        )
    if lengths is not None and len(lengths) != samples:
        raise InputError(
            f"there are {len(lengths)} lengths for {samples} samples",
            "one length per sample",
            "pass lengths in the order of the dataset",
            code="E_LOADER",
        )
