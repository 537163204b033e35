"""Samplers, which belong to a loader of torch."""

from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import samestep
from samestep.errors import InputError

DATA = TensorDataset(torch.arange(48.0))
RANDOM = RandomSampler(DATA)


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": RANDOM},
        {"sampler": [3, 1]},
        {"sampler": lambda seed, epoch: range(48)},
        {"batch_sampler": BatchSampler(RANDOM, 4, False)},
    ],
)
def test_samplers_belong_to_a_loader_of_torch(options: dict[str, Any]) -> None:
    with pytest.raises(InputError) as error:
        samestep.loader(DATA, **options)
    assert error.value.code == "E_LOADER"
    assert "DataLoader(dataset" in error.value.fix
    batches = samestep.loader(DataLoader(DATA, 4, sampler=RANDOM))
    assert sorted(torch.cat([value for (value,) in batches]).int().tolist()) == [*range(48)]
