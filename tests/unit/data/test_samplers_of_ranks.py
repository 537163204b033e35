"""Samplers whose epochs never end, or that depend on the number of processes or on earlier epochs."""

import random
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import Sampler, TensorDataset

import samestep
from samestep.distributed.world import World
from samestep.errors import InputError
from samestep.launcher.process_state import process_state

DATA = TensorDataset(torch.arange(48.0))


class Endless(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield from range(48)


class EndlessBatches(Sampler[list[int]]):
    def __iter__(self) -> Iterator[list[int]]:
        while True:
            yield [0, 1, 2, 3]


class OfWorld(Sampler[int]):
    def __init__(self, world: World) -> None:
        self.world = world

    def __iter__(self) -> Iterator[int]:
        yield from range(self.world.rank, 48, self.world.size)


class Levels(Sampler[int]):
    """More samples in each epoch; the level is in a container, a tensor or an object."""

    def __init__(self, level: Any, name: Any) -> None:
        self.level = level
        self.name = name

    def __iter__(self) -> Iterator[int]:
        values = vars(self.level) if isinstance(self.level, SimpleNamespace) else self.level
        yield from range(8 * int(values[self.name]))
        values[self.name] += 1


class Shuffled(Sampler[int]):
    """Shuffles its groups in place, and keeps the indices of the epoch."""

    def __init__(self) -> None:
        self.groups = [[0, 1, 2], [3, 4], [5]]
        self.indices: list[int] = []

    def __iter__(self) -> Iterator[int]:
        random.shuffle(self.groups)
        for group in self.groups:
            random.shuffle(group)
        self.indices = [index for group in self.groups for index in group]
        yield from self.indices


def code_of(**options: Any) -> str:
    with pytest.raises(InputError) as error:
        samestep.loader(DATA, **options)
    return error.value.code


def test_endless_samplers_are_refused(alone: World) -> None:
    assert code_of(batch_size=8, sampler=Endless()) == "E_LOADER"
    assert code_of(batch_sampler=EndlessBatches()) == "E_LOADER"
    assert code_of(batch_size=8, sampler=lambda seed, epoch: count()) == "E_LOADER"
    # Longer than the data set, as with replacement.
    long = torch.utils.data.RandomSampler(DATA, replacement=True, num_samples=4800)
    assert len(samestep.loader(DATA, 8, sampler=long)) == 600


def test_samplers_of_the_number_of_ranks_are_refused(alone: World) -> None:
    world = process_state.world
    assert world is not None
    assert code_of(batch_size=8, sampler=lambda seed, epoch: list(range(world.size, 48))) == "E_LOADER"
    assert code_of(batch_size=8, sampler=OfWorld(world)) == "E_LOADER"
    assert code_of(batch_sampler=lambda seed, epoch: [list(range(8 * world.size))] * 2) == "E_LOADER"
    assert world.size == 1
    assert len(samestep.loader(DATA, 8, sampler=lambda seed, epoch: range(epoch, 48))) == 6


@pytest.mark.parametrize(
    ("level", "name"), [([1], 0), ({"now": 1}, "now"), (torch.ones(1), 0), (SimpleNamespace(now=1), "now")]
)
def test_samplers_that_depend_on_earlier_epochs_are_refused(level: Any, name: Any) -> None:
    assert code_of(batch_size=8, sampler=Levels(level, name)) == "E_LOADER"


def test_samplers_that_shuffle_in_place_are_taken() -> None:
    batches = samestep.loader(DATA, 4, sampler=Shuffled())
    assert [sorted(torch.cat([value for (value,) in batches]).int().tolist()) for _ in range(2)] == [[*range(6)]] * 2
