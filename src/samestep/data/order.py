"""Global order of samples: a pure function of (seed, epoch), and of lengths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy
import torch

from samestep.config import SampleOrder
from samestep.data.permutation import DatasetOrder, Indices, KeyedPermutation, Order, random_order
from samestep.distributed.rng import derive_seed
from samestep.errors import DataError, InputError

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

    The order `shuffled` is an array. The order `keyed` computes the indices of a slice.
    """
    if not shuffle:
        return DatasetOrder(size)
    if resolve_order(order, size) == "keyed":
        return KeyedPermutation(size, seed=seed, epoch=epoch)
    return random_order(size, derive_seed("order", seed, epoch))


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
    rows = rows[random_order(batches, derive_seed("order", seed, epoch, batch_size))]
    # Samples stay sorted within a batch, because each microbatch is padded separately.
    return numpy.concatenate([rows.reshape(-1), rest[numpy.argsort(lengths[rest], kind="stable")]])


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
