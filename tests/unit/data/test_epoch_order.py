"""Samplers of scripts: endless ones, those of a number of processes, and objects of torch."""

from itertools import count
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import samestep
from samestep.distributed.world import World
from samestep.errors import InputError
from samestep.launcher.process_state import process_state

DATA = TensorDataset(torch.arange(48.0))


def refused(**options: Any) -> InputError:
    with pytest.raises(InputError) as error:
        samestep.loader(DATA, **options)
    assert error.value.code == "E_LOADER"
    return error.value


def test_endless_samplers_are_refused(alone: World) -> None:
    refused(batch_size=8, sampler=lambda seed, epoch: count())
    # Longer than the data set, as with replacement.
    assert len(samestep.loader(DATA, 8, sampler=lambda seed, epoch: [*range(48)] * 100)) == 600


def test_samplers_of_the_number_of_ranks_are_refused(alone: World) -> None:
    world = process_state.world
    assert world is not None
    refused(batch_size=8, sampler=lambda seed, epoch: list(range(world.size, 48)))
    assert world.size == 1
    assert len(samestep.loader(DATA, 8, sampler=lambda seed, epoch: range(epoch, 48))) == 6


def test_samplers_of_torch_belong_to_a_loader_of_torch() -> None:
    random = RandomSampler(DATA)
    for options in ({"sampler": random}, {"sampler": [3, 1]}, {"batch_sampler": BatchSampler(random, 4, False)}):
        assert "DataLoader(dataset" in refused(**options).fix
    batches = samestep.loader(DataLoader(DATA, 4, sampler=random))
    assert sorted(torch.cat([value for (value,) in batches]).int().tolist()) == [*range(48)]


def test_functions_draw_from_seeded_generators(alone: World) -> None:
    batches = samestep.loader(DATA, 48, sampler=lambda seed, epoch: torch.randperm(48).tolist(), seed=3)
    first, second = ([value.int().tolist() for (value,) in batches] for _ in range(2))
    assert first != second
    again = samestep.loader(DATA, 48, sampler=lambda seed, epoch: torch.randperm(48).tolist(), seed=3)
    assert [value.int().tolist() for (value,) in again] == first
