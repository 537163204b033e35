"""Samplers of scripts: functions of (seed, epoch), equal on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sized
from itertools import islice
from typing import Any

from samestep.distributed.rng import derive_seed, preserved_generators, seed_generators
from samestep.errors import InputError
from samestep.launcher.process_state import process_state

Sampler = Callable[[int, int], Iterable[Any]]  # from seed and epoch to indices

_MOST_DRAWN = 2**20  # in an epoch of a small data set


def draw(sampler: Sampler, samples: int, seed: int, epoch: int) -> list[Any]:
    """Return the indices of one epoch, drawn with global generators that are seeded for it.

    Raises:
        InputError: the epoch does not end.
    """
    with preserved_generators():
        seed_generators(derive_seed("order", seed, epoch))
        drawn = sampler(seed, epoch)
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


def require_equal_on_other_ranks(sampler: Sampler, samples: int, seed: int) -> None:
    """Require that a sampler of the script draws the same in a world of another size."""
    world = process_state.world
    if world is None:
        return
    drawn = list(map(repr, draw(sampler, samples, seed, epoch=0)))
    size = world.size
    try:
        object.__setattr__(world, "size", size + 1)  # it is frozen; no other code runs meanwhile
        other = list(map(repr, draw(sampler, samples, seed, epoch=0)))
    finally:
        object.__setattr__(world, "size", size)
    if other != drawn:
        raise sampler_error(
            f"the sampler draws other indices with {size + 1} processes than with {size}",
            "an order that does not depend on the number of processes",
            "leave world.size out of the sampler: the loader divides each global batch",
        )


def require_function(sampler: Any, batch_sampler: Any) -> None:
    """Require that a sampler is a function of (seed, epoch): a loader of torch has others.

    Raises:
        InputError: it is an object with an order of its own.
    """
    for name, value in (("sampler", sampler), ("batch_sampler", batch_sampler)):
        is_function = callable(value) and not isinstance(value, Iterable) and name == "sampler"
        if value is not None and not is_function:
            raise sampler_error(
                f"samestep.loader received the {name} {type(value).__name__} and a data set",
                "sampler=lambda seed, epoch: ..., which returns the indices of an epoch",
                f"samestep.loader(DataLoader(dataset, {name}=...)), whose order is that of torch",
            )


def sampler_error(value: str, expected: str, fix: str) -> InputError:
    """Return the error of a sampler that cannot be divided or resumed."""
    return InputError(value, expected, fix, code="E_LOADER")
