"""Global order of samples: a pure function of (seed, epoch), and of lengths or of a sampler."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from operator import index as as_index
from typing import Any, Literal

import numpy
import torch

from samestep.config import SampleOrder
from samestep.data.permutation import DatasetOrder, Indices, KeyedPermutation, Order
from samestep.distributed.rng import derive_seed, preserved_generators, seed_generators
from samestep.errors import DataError, InputError

# Function of (seed, epoch), or a sampler of torch. Yields indices, or lists of indices as a batch sampler.
Sampler = Callable[[int, int], Iterable[Any]] | Iterable[Any]

# Global batches per window of samples that are sorted by length together. A large window gives batches of nearly equal
# length; at least some windows per epoch keep the samples of a batch different from epoch to epoch.
_MAX_BATCHES_PER_WINDOW, _MIN_WINDOWS = 50, 4


# `auto` is `keyed` for more samples: `shuffled` then takes seconds and hundreds of MB per epoch and rank.
KEYED_ABOVE = 10_000_000


def resolve_order(order: SampleOrder, size: int) -> Literal["shuffled", "keyed"]:
    """Return the kind of order of `size` samples."""
    if order == "auto":
        return "keyed" if size > KEYED_ABOVE else "shuffled"
    return order


def global_order(size: int, *, seed: int, epoch: int, shuffle: bool, order: SampleOrder = "shuffled") -> Order:
    """Return the sample indices of one epoch in the order of use, length `size`.

    The order `shuffled` is an array that sorts `size` random keys. The keys are the raw output of Philox (Salmon et
    al., "Parallel random numbers: as easy as 1, 2, 3", 2011), which NumPy keeps stable between versions, unlike its
    `permutation`. The order `keyed` computes the indices of a slice.
    """
    if not shuffle:
        return DatasetOrder(size)
    if resolve_order(order, size) == "keyed":
        return KeyedPermutation(size, seed=seed, epoch=epoch)
    return _random_order(size, derive_seed("order", seed, epoch))


def grouped_order(lengths: Indices, batch_size: int, *, seed: int, epoch: int, shuffle: bool) -> Indices:
    """Return the sample indices of one epoch with samples of similar length in one global batch, to reduce padding.

    Windows of several global batches of `global_order` are sorted by length and cut into batches; the batches are then
    shuffled. Samples that do not fill a batch are separated before sorting, so the last batch is not biased towards
    short or long samples. Without `shuffle`, all samples are sorted by length. `lengths` has one length per sample.
    """
    order = global_order(len(lengths), seed=seed, epoch=epoch, shuffle=shuffle)[:]
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


def drawn_order(sampler: Sampler, dataset: Any, *, seed: int, epoch: int, batch_size: int | None = None) -> Indices:
    """Return the sample indices of one epoch from a sampler.

    Args:
        sampler: see `draw`.
        dataset: the indices are those of its samples.
        seed: seed of the loader.
        epoch: number of the epoch.
        batch_size: for a batch sampler, the size of all batches except for the last.

    Raises:
        InputError: `draw` fails, batches differ in size, or an index is not that of a sample.
    """
    drawn = draw(sampler, dataset, seed=seed, epoch=epoch)
    if batch_size is not None:
        sizes = [len(batch) for batch in drawn]
        if any(size != batch_size for size in sizes[:-1]) or not 0 < sizes[-1] <= batch_size:
            raise _sampler_error(
                f"the batch sampler yields batches of {min(sizes)} to {max(sizes)} samples",
                "global batches of one size; only the last one can have fewer samples",
                "batch_size=N with sampler=, or with lengths= to group samples by length",
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
    if order.size and not 0 <= order.min() <= order.max() < len(dataset):
        raise _sampler_error(
            f"the sampler yields indices from {order.min()} to {order.max()}",
            f"indices from 0 to {len(dataset) - 1}, those of the samples of the dataset",
            "create the sampler from the dataset of the loader",
        )
    return order


def draw(sampler: Sampler, dataset: Any, *, seed: int, epoch: int) -> list[Any]:
    """Return all that a sampler yields in one epoch, a function of seed and epoch on every rank.

    A function is called with seed and epoch. Another sampler is copied, with its lists, arrays and generators, so that
    no draw depends on earlier ones. Its generators and the global ones are seeded, and `set_epoch` is called if it has
    one. The dataset is not copied.

    Raises:
        InputError: the sampler divides the data among ranks, or depends on earlier draws.
    """
    with preserved_generators():
        state = derive_seed("order", seed, epoch)
        seed_generators(state)
        if not isinstance(sampler, Iterable):
            return list(sampler(seed, epoch))
        fresh = _fresh_sampler(sampler, dataset, state)
        has_epoch = callable(getattr(fresh, "set_epoch", None))
        if has_epoch:
            fresh.set_epoch(epoch)
        before = _plain_attributes(fresh)
        drawn = list(fresh)
        if fresh is not sampler and not has_epoch and _plain_attributes(fresh) != before:
            raise _sampler_error(
                f"the sampler {type(sampler).__name__} changes while it draws: an epoch depends on earlier ones",
                "an order that is a function of seed and epoch: a resumed run must have the same",
                "pass sampler=lambda seed, epoch: ..., or give the sampler a method set_epoch(epoch)",
            )
        return drawn


def _fresh_sampler(sampler: Any, dataset: Any, seed: int) -> Any:
    """Return a copy of a sampler with copies of its containers, seeded generators, and shared other attributes."""
    if getattr(sampler, "num_replicas", None) is not None:
        raise _sampler_error(
            f"{type(sampler).__name__} divides the data among ranks",
            "a sampler of global indices, the same on every rank: the loader divides each global batch",
            "leave the sampler out and pass shuffle=True; set_epoch is not needed either",
        )
    if isinstance(sampler, Iterator) and not isinstance(sampler, torch.utils.data.Sampler):
        raise _sampler_error(
            f"the sampler is an iterator ({type(sampler).__name__}), which yields indices only once",
            "indices for each epoch",
            "pass a list, a sampler of torch, or sampler=lambda seed, epoch: ...",
        )
    if not hasattr(sampler, "__dict__"):  # such as a list or a range
        return sampler
    fresh = copy(sampler)
    vars(fresh).update({name: _fresh(value, dataset, seed) for name, value in vars(sampler).items()})
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
        elif isinstance(fresh, list):
            fresh[:] = [item if isinstance(item, int) else _fresh(item, dataset, seed) for item in fresh]
    return fresh


def _plain_attributes(sampler: Any) -> dict[str, Any]:
    return {
        name: value for name, value in getattr(sampler, "__dict__", {}).items() if isinstance(value, int | float | str)
    }


def _sampler_error(value: str, expected: str, fix: str) -> InputError:
    return InputError(value, expected, fix, code="E_SAMPLER")


def repeats_of(order: Indices) -> Indices:
    """Return for each index of an order how often the index occurs before."""
    positions = numpy.argsort(order, kind="stable")
    ordered = order[positions]
    first = numpy.searchsorted(ordered, ordered, side="left")
    counts = numpy.empty_like(order)
    counts[positions] = numpy.arange(len(order)) - first
    return counts


_EXCLUSIVE = (  # arguments that exclude each other, as those of torch's DataLoader
    ("sampler", "shuffle"),
    ("sampler", "lengths"),
    ("batch_sampler", "sampler"),
    ("batch_sampler", "shuffle"),
    ("batch_sampler", "lengths"),
    ("batch_sampler", "batch_size"),
    ("batch_sampler", "drop_last"),
    ("generator", "seed"),
    ("sampler", "order"),
    ("batch_sampler", "order"),
    ("lengths", "order"),
)


def require_compatible(dataset: Any, arguments: Mapping[str, Any]) -> None:
    """Require a dataset with an index, and arguments of a loader that fit together.

    Raises:
        InputError: the dataset is iterable only, or two arguments exclude each other.
    """
    if isinstance(dataset, torch.utils.data.IterableDataset) or not hasattr(dataset, "__len__"):
        raise InputError(
            f"the dataset {type(dataset).__name__} has no length and index",
            "a dataset with __len__ and __getitem__: order, augmentation and resumption are functions of the index",
            "samestep.loader(list(dataset), ...) if the samples fit into memory, or an index of files and offsets",
            code="E_ITERABLE_DATASET",
        )
    present = {name for name, value in arguments.items() if value is not None and value is not False}
    present -= {"order"} if arguments.get("order") != "keyed" else set()  # the order of lengths is `shuffled`
    for one, other in _EXCLUSIVE:
        if one in present and other in present:
            raise InputError(
                f"{one} and {other} of a loader exclude each other",
                "one of them",
                f"leave out {other}",
                code="E_LOADER",
            )


def require_samples(samples: int, batch_size: int, lengths: Indices | None, *, drop_last: bool) -> None:
    """Require samples in an epoch, and one length for each.

    Raises:
        DataError: there are no samples, or too few for a batch.
        InputError: the number of lengths is another one.
    """
    if samples == 0:
        raise DataError(
            "the dataset is empty", "at least one sample", "check the path and the filters", code="E_EMPTY_DATASET"
        )
    if drop_last and samples < batch_size:
        raise DataError(
            f"the dataset has {samples} samples, fewer than one batch of {batch_size}, and drop_last is set",
            expected="at least one complete batch",
            fix=f"batch_size={samples} or less, or leave drop_last out",
            code="E_EMPTY_DATASET",
        )
    if lengths is not None and len(lengths) != samples:
        raise InputError(
            f"there are {len(lengths)} lengths for {samples} samples",
            "one length per sample",
            "pass lengths in the order of the dataset",
            code="E_LENGTHS",
        )
