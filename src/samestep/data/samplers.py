"""Samplers of scripts: what they yield in an epoch, equal on any number of ranks."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from copy import copy
from itertools import islice
from typing import Any

import numpy
import torch

from samestep.distributed.device_reads import device_reads
from samestep.distributed.rng import derive_seed, preserved_generators, seed_generators
from samestep.errors import InputError
from samestep.launcher.process_state import process_state

# Function of (seed, epoch), or a sampler of torch. Yields indices, or lists of indices as a batch
# sampler.
Sampler = Callable[[int, int], Iterable[Any]] | Iterable[Any]

_LIBRARIES = ("builtins", "numpy", "random", "torch")
_PLAIN = (int, float, str)
_MOST_DRAWN = 2**20  # in an epoch of a small data set


def draw(sampler: Sampler, dataset: Any, seed: int, epoch: int) -> list[Any]:
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
            raise sampler_error(
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
        raise sampler_error(
            f"the sampler yields more than {most:,} indices of {samples:,} samples",
            "a sampler whose epochs end",
            "end its iteration after one epoch: the loop over epochs is that of the script",
        )
    return collected


def require_equal_on_other_ranks(sampler: Sampler, dataset: Any, seed: int) -> None:
    """Require that a sampler of the script draws the same in a world of another size."""
    world = process_state.world
    if world is None or type(sampler).__module__.startswith("torch."):
        return
    drawn = list(map(repr, draw(sampler, dataset, seed, epoch=0)))
    size = world.size
    try:
        object.__setattr__(world, "size", size + 1)  # it is frozen; no other code runs meanwhile
        other = list(map(repr, draw(sampler, dataset, seed, epoch=0)))
    finally:
        object.__setattr__(world, "size", size)
    if other != drawn:
        raise sampler_error(
            f"the sampler draws other indices with {size + 1} processes than with {size}",
            "an order that does not depend on the number of processes",
            "leave world.size out of the sampler: the loader divides each global batch",
        )


def _fresh_sampler(sampler: Any, dataset: Any, seed: int) -> Any:
    """Return a copy of a sampler with copied containers and seeded generators."""
    if getattr(sampler, "num_replicas", None) is not None:
        raise sampler_error(
            f"{type(sampler).__name__} divides the data among ranks",
            "a sampler of global indices, the same on every rank: the loader divides each global "
            "batch",
            "leave the sampler out and pass shuffle=True; set_epoch is not needed either",
        )
    if isinstance(sampler, Iterator) and not isinstance(sampler, torch.utils.data.Sampler):
        raise sampler_error(
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


def sampler_error(value: str, expected: str, fix: str) -> InputError:
    """Return the error of a sampler that cannot be divided or resumed."""
    return InputError(value, expected, fix, code="E_LOADER")
