"""Batches of each epoch as a function of (seed, epoch): from a shuffle, lengths or a sampler."""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from copy import copy
from itertools import islice
from operator import index as as_index
from typing import Any, get_args

import numpy
import torch

from samestep.config import SampleOrder
from samestep.data.order import (
    Indices,
    Order,
    global_order,
    grouped_order,
    repeats_of,
    resolve_order,
)
from samestep.data.sample_reader import set_epoch
from samestep.data.streams import StreamDataset
from samestep.distributed.device_reads import device_reads
from samestep.distributed.rng import derive_seed, preserved_generators, seed_generators
from samestep.errors import DataError, InputError
from samestep.launcher.process_state import process_state
from samestep.microbatches import Cursor, require_integer, require_position

# Function of (seed, epoch), or a sampler of torch. Yields indices, or lists of indices as a batch
# sampler.
Sampler = Callable[[int, int], Iterable[Any]] | Iterable[Any]

_LIBRARIES = ("builtins", "numpy", "random", "torch")
_PLAIN = (int, float, str)
_MOST_DRAWN = 2**20  # in an epoch of a small data set
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
        _require_compatible(dataset, options)
        self._dataset = dataset
        if options["generator"] is not None:
            self.seed = options["generator"].initial_seed()
        else:
            seed = options["seed"] or 0
            self.seed = require_integer("seed", seed, at_least=0, at_most=2**64 - 1, example=0)
        self._sampler: Sampler | None = options["sampler"]
        self._draws_batches = options["batch_sampler"] is not None
        batch_size = options["batch_size"]
        if self._draws_batches:
            self._sampler = options["batch_sampler"]
            first = next(iter(_draw(options["batch_sampler"], dataset, self.seed, epoch=0)), ())
            batch_size = len(first)
        self.batch_size = require_integer("batch_size", batch_size, at_least=1, example=64)
        self._shuffle = bool(options["shuffle"])
        self._drop_last = bool(options["drop_last"])
        lengths: Sequence[int] | None = options["lengths"]
        self._lengths = None if lengths is None else numpy.asarray(lengths, dtype=numpy.int64)
        self._kind: SampleOrder = "shuffled"
        if self._shuffle and lengths is None:
            self._kind = options["order"]
        self._stream: StreamDataset | None = None
        has_indices = self._sampler is not None or lengths is not None
        if isinstance(dataset, StreamDataset) and options["order"] == "auto" and not has_indices:
            self._stream = dataset
        self._samples = 0
        self._sizes = (-1, -1)  # epoch and length of the data set for which `_samples` holds
        self._settings: dict[tuple[int, int], dict[str, int | str]] = {}
        self.cursor = Cursor()
        self.samples_of(0)
        if self._sampler is not None:
            _require_equal_on_other_ranks(self._sampler, dataset, self.seed)

    def samples_of(self, epoch: int) -> int:
        """Return the number of samples of an epoch, without those that `drop_last` leaves out."""
        if (epoch, len(self._dataset)) != self._sizes:
            set_epoch(self._dataset, self.seed, epoch)
            samples = len(self._dataset) if self._sampler is None else len(self.order(epoch))
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
        samples = self.samples_of(epoch)
        key = (epoch, len(self._dataset))
        if key in self._settings:  # saves of an epoch draw its order once
            return self._settings[key]
        drawn = ""
        if self._sampler is not None:
            drawn = _digest(self.order(epoch)[:samples])
        settings: dict[str, int | str] = {
            "samples": samples,
            "dataset": len(self._dataset),
            "batch_size": self.batch_size,
            "seed": self.seed,
            "shuffle": self._shuffle,
            "order": resolve_order(self._kind, len(self._dataset)),
            "sampler": drawn,
            "lengths": _digest(self._lengths),
        }
        if self._stream is not None:
            settings |= self._stream.settings(shuffle=self._shuffle)
        self._settings = {key: settings}
        return settings

    def adopt(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of a checkpoint; those without `order` are of a `shuffled` order."""
        if "order" not in settings and self._kind == "auto":
            self._kind = "shuffled"
            self._settings.clear()
        return {"order": "shuffled", **settings}

    def order(self, epoch: int) -> Order:
        """Return the samples of an epoch in the order of use, also those `drop_last` leaves out."""
        set_epoch(self._dataset, self.seed, epoch)
        facts: dict[str, Any] = {"seed": self.seed, "epoch": epoch, "shuffle": self._shuffle}
        if self._stream is not None:
            return self._stream.order(**facts)
        if self._sampler is not None:
            return self._drawn(self._sampler, epoch)
        if self._lengths is not None:
            return grouped_order(self._lengths, self.batch_size, **facts)
        return global_order(len(self._dataset), order=self._kind, **facts)

    def _drawn(self, sampler: Sampler, epoch: int) -> Indices:
        """Return the indices of a sampler.

        Raises:
            InputError: `_draw` fails, batches differ in size, or an index is not that of a sample.
        """
        drawn = _draw(sampler, self._dataset, self.seed, epoch)
        if self._draws_batches:
            sizes = [len(batch) for batch in drawn]
            is_last_valid = 0 < sizes[-1] <= self.batch_size
            if any(size != self.batch_size for size in sizes[:-1]) or not is_last_valid:
                raise _sampler_error(
                    f"the batch sampler yields batches of {min(sizes)} to {max(sizes)} samples",
                    "global batches of one size; only the last one can have fewer samples",
                    "samestep.loader(DataLoader(dataset, batch_sampler=...)), which has batches of "
                    "any size; or batch_size=N with lengths= to group samples by length",
                )
            drawn = [index for batch in drawn for index in batch]
        try:
            order = numpy.fromiter(map(as_index, drawn), dtype=numpy.int64)
        except TypeError as error:
            raise _sampler_error(
                f"the sampler yields a {type(drawn[0]).__name__} in place of an index",
                "indices of samples",
                "pass a sampler that yields lists of indices as batch_sampler=",
            ) from error
        if order.size and not 0 <= order.min() <= order.max() < len(self._dataset):
            raise _sampler_error(
                f"the sampler yields indices from {order.min()} to {order.max()}",
                f"indices from 0 to {len(self._dataset) - 1}, those of the samples of the dataset",
                "create the sampler from the dataset of the loader",
            )
        return order

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


def _digest(indices: Indices | None) -> str:
    content = b"" if indices is None else indices.tobytes()
    return hashlib.blake2b(content, digest_size=4).hexdigest()


def _require_compatible(dataset: Any, arguments: Mapping[str, Any]) -> None:
    """Require a dataset with an index, and arguments of a loader that fit together."""
    order = arguments["order"]
    orders = get_args(SampleOrder)
    if order not in orders:
        raise InputError(
            f"order of a loader is {order!r}",
            f"one of {', '.join(orders)}",
            "leave out order, or order='auto'",
            code="E_VALUE",
        )
    if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__"):
        raise InputError(
            f"the dataset {type(dataset).__name__} has no length and index",
            "a dataset with __len__ and __getitem__: order, augmentation and resumption are "
            "functions of the index",
            "samestep.loader(list(dataset), ...) if the samples fit into memory, or an index of "
            "files and offsets",
            code="E_LOADER",
        )
    # Not `value not in (None, False)`: a seed of 0 is present, and lengths can be an array.
    absent = (None, False)
    present = {name for name, value in arguments.items() if not any(value is one for one in absent)}
    if order != "keyed":  # the order of lengths is `shuffled`
        present.discard("order")
    for one, others in _EXCLUSIVE.items():
        other = next((name for name in others if name in present), None)
        if one in present and other is not None:
            problem = f"{one} and {other} of a loader exclude each other"
            raise InputError(problem, "one of them", f"leave out {other}", code="E_LOADER")


def _draw(sampler: Sampler, dataset: Any, seed: int, epoch: int) -> list[Any]:
    """Return all that a sampler yields in one epoch, a function of seed and epoch on every rank.

    A function is called with seed and epoch. Another sampler is copied, so that no draw depends on
    earlier ones. Its generators and the global ones are seeded, and `set_epoch` is called if it has
    one.

    Raises:
        InputError: the sampler divides the data among ranks, or depends on earlier draws.
    """
    with preserved_generators():
        state = derive_seed("order", seed, epoch)
        seed_generators(state)
        if not isinstance(sampler, Iterable):
            return _listed(sampler(seed, epoch), len(dataset))
        fresh = _fresh_sampler(sampler, dataset, state)
        has_epoch = callable(getattr(fresh, "set_epoch", None))
        if has_epoch:
            fresh.set_epoch(epoch)
        attributes = getattr(fresh, "__dict__", {})
        # Not those that it makes while it draws, such as the batches of the epoch for `__len__`.
        values = list(attributes.values())
        before = _plain(attributes), _content(values, {id(dataset)})
        drawn = _listed(fresh, len(dataset))
        after = _plain(attributes), _content(values, {id(dataset)})
        if fresh is not sampler and not has_epoch and after != before:
            raise _sampler_error(
                f"the sampler {type(sampler).__name__} changes while it draws: "
                "an epoch depends on earlier ones",
                "an order that is a function of seed and epoch: a resumed run must have the same",
                "pass sampler=lambda seed, epoch: ..., or give the sampler a method "
                "set_epoch(epoch)",
            )
        return drawn


def _listed(drawn: Iterable[Any], samples: int) -> list[Any]:
    """Return what a sampler yields in an epoch of a data set with `samples` samples."""
    most = max(_MOST_DRAWN, 100 * samples)
    if isinstance(drawn, Sized):
        most = max(most, len(drawn))
    collected = list(islice(drawn, most + 1))
    if len(collected) > most:
        raise _sampler_error(
            f"the sampler yields more than {most:,} indices of {samples:,} samples",
            "a sampler whose epochs end",
            "end its iteration after one epoch: the loop over epochs is that of the script",
        )
    return collected


def _require_equal_on_other_ranks(sampler: Sampler, dataset: Any, seed: int) -> None:
    """Require that a sampler of the script draws the same in a world of another size."""
    world = process_state.world
    if world is None or type(sampler).__module__.startswith("torch."):
        return
    drawn = list(map(repr, _draw(sampler, dataset, seed, epoch=0)))
    size = world.size
    try:
        object.__setattr__(world, "size", size + 1)  # it is frozen; no other code runs meanwhile
        other = list(map(repr, _draw(sampler, dataset, seed, epoch=0)))
    finally:
        object.__setattr__(world, "size", size)
    if other != drawn:
        raise _sampler_error(
            f"the sampler draws other indices with {size + 1} processes than with {size}",
            "an order that does not depend on the number of processes",
            "leave world.size out of the sampler: the loader divides each global batch",
        )


def _fresh_sampler(sampler: Any, dataset: Any, seed: int) -> Any:
    """Return a copy of a sampler with copied containers and seeded generators."""
    if getattr(sampler, "num_replicas", None) is not None:
        raise _sampler_error(
            f"{type(sampler).__name__} divides the data among ranks",
            "a sampler of global indices, the same on every rank: the loader divides each global "
            "batch",
            "leave the sampler out and pass shuffle=True; set_epoch is not needed either",
        )
    if isinstance(sampler, Iterator) and not isinstance(sampler, torch.utils.data.Sampler):
        raise _sampler_error(
            f"the sampler is an iterator ({type(sampler).__name__}), which yields indices once",
            "indices for each epoch",
            "pass a list, a sampler of torch, or sampler=lambda seed, epoch: ...",
        )
    if not hasattr(sampler, "__dict__"):  # such as a list or a range
        return sampler
    # Not a deep copy, because attributes can be large, such as the data sets of a `ConcatDataset`.
    fresh = copy(sampler)
    for name, value in vars(sampler).items():
        vars(fresh)[name] = _fresh(value, dataset, seed)
    return fresh


def _fresh(value: Any, dataset: Any, seed: int) -> Any:
    fresh = value  # also the dataset, and objects that are no containers
    if isinstance(value, torch.utils.data.Sampler):
        fresh = _fresh_sampler(value, dataset, seed)
    elif isinstance(value, torch.Generator):
        fresh = torch.Generator(value.device).manual_seed(seed)
    elif isinstance(value, numpy.random.Generator):
        fresh = numpy.random.Generator(type(value.bit_generator)(seed))
    elif isinstance(value, numpy.random.RandomState):
        fresh = numpy.random.RandomState(seed % 2**32)
    elif isinstance(value, random.Random):
        fresh = random.Random(seed)
    elif isinstance(value, torch.Tensor):
        fresh = value.clone()
    elif value is not dataset and isinstance(value, numpy.ndarray | list | dict):
        fresh = copy(value)
        if isinstance(fresh, dict):
            fresh.update({key: _fresh(item, dataset, seed) for key, item in fresh.items()})
        elif isinstance(fresh, list) and not all(isinstance(item, int) for item in fresh):
            fresh[:] = [_fresh(item, dataset, seed) for item in fresh]
    return fresh


def _plain(attributes: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in attributes.items() if isinstance(value, _PLAIN)}


def _content(value: Any, seen: set[int]) -> int:
    """Return a hash of a value of a sampler. Orders do not count: a list can be shuffled in place.

    Objects count with their attributes, but not those of libraries, such as generators.
    """
    if isinstance(value, torch.Tensor):
        value = device_reads.copy(value.detach()).numpy()
    if isinstance(value, numpy.ndarray) and value.dtype != object:
        return hash(numpy.sort(value, axis=None).tobytes())
    if isinstance(value, _PLAIN):
        return hash((type(value), value))
    if id(value) in seen or isinstance(value, torch.utils.data.Dataset):
        return 0
    seen.add(id(value))
    parts: Iterable[Any] = ()
    if isinstance(value, list | tuple | set | deque):
        parts = value
    elif isinstance(value, dict):
        parts = value.values()
    elif type(value).__module__.partition(".")[0] not in _LIBRARIES:
        parts = getattr(value, "__dict__", {}).values()
    if {*map(type, parts)} <= {*_PLAIN}:  # mostly many indices
        return sum(map(hash, zip(parts)))
    return sum(_content(part, seen) for part in parts)


def _sampler_error(value: str, expected: str, fix: str) -> InputError:
    return InputError(value, expected, fix, code="E_LOADER")
