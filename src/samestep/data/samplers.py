"""Samplers as a global order: indices that are a pure function of (seed, epoch)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from operator import index as as_index
from typing import Any

import numpy
import torch

from samestep.data.order import Indices
from samestep.distributed.rng import derive_seed, preserved_generators, seed_generators
from samestep.errors import InputError

# Function of (seed, epoch), or a sampler of torch. Yields indices, or lists of indices as a batch
# sampler.
Sampler = Callable[[int, int], Iterable[Any]] | Iterable[Any]


def drawn_order(
    sampler: Sampler, dataset: Any, *, seed: int, epoch: int, batch_size: int | None = None
) -> Indices:
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
    vars(fresh).update(
        {name: _fresh(value, dataset, seed) for name, value in vars(sampler).items()}
    )
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
            fresh[:] = [
                item if isinstance(item, int) else _fresh(item, dataset, seed) for item in fresh
            ]
    return fresh


def _plain_attributes(sampler: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in getattr(sampler, "__dict__", {}).items()
        if isinstance(value, int | float | str)
    }


def _sampler_error(value: str, expected: str, fix: str) -> InputError:
    return InputError(value, expected, fix, code="E_LOADER")
