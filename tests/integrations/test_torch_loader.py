"""Loaders of global batches with the options of torch's `DataLoader`."""

import random
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch.utils.data import DataLoader, RandomSampler, WeightedRandomSampler, default_collate

import samestep
from samestep.data.loader import Loader
from samestep.errors import InputError
from samestep.integrations.torch_loader import global_loader

ROWS = list(range(40))
ALONE = samestep.World(rank=0, size=1, device=torch.device("cpu"))


def loader_of(**options: Any) -> Loader:
    data: Any = ROWS
    return global_loader(DataLoader(data, 8, **options), world=ALONE, seed=5, microbatches=4)


def order(loader: Loader) -> list[int]:
    return [int(index) for batch in loader.complete_epoch() for index in batch.indices]


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_seed_of_a_generator_replaces_the_seed_of_the_adapter() -> None:
    data: Any = ROWS
    own = Loader(data, batch_size=8, microbatches=4, world=ALONE, shuffle=True, generator=generator(1))
    assert order(loader_of(shuffle=True, generator=generator(1))) == order(own)
    assert order(loader_of(sampler=RandomSampler(ROWS, generator=generator(1)))) == order(own)
    assert order(loader_of(shuffle=True, generator=generator(2))) != order(own)
    assert loader_of(shuffle=True).settings_of(0)["seed"] == 5


def test_seed_of_a_generator_replaces_the_seed_for_other_samplers() -> None:
    orders = [
        order(loader_of(sampler=WeightedRandomSampler([1.0] * 40, 40, generator=generator(seed)))) for seed in (1, 2, 1)
    ]
    assert orders[0] == orders[2] != orders[1]


class Collator:
    draw: Any

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def __call__(self, samples: list[Any]) -> Any:
        return default_collate(samples)

    def collate(self, samples: list[Any]) -> Any:
        return default_collate(samples)

    def draw_and_collate(self, samples: list[Any]) -> Any:
        return default_collate(samples) + self.draw.random()


@pytest.mark.parametrize(
    "collate",
    [
        Collator(seed=42, generator=None),
        Collator(seed=None, generator=generator(1)),
        Collator(draw=random.Random(1)),
        Collator(draw=numpy.random.default_rng(1)),
        Collator(data_collator=Collator(seed=0)),  # as Transformers wraps collators
        partial(Collator(seed=0)),
        Collator(draw=numpy.random.RandomState(1)).draw_and_collate,
    ],
)
def test_collation_with_random_numbers_of_its_own_is_refused(collate: Any) -> None:
    with pytest.raises(InputError, match="Collator") as caught:
        loader_of(collate_fn=collate)
    assert caught.value.code == "E_INTEGRATION"


@pytest.mark.parametrize(
    "collate",
    [
        default_collate,
        Collator(seed=None),
        Collator(seed=42, splits=generator(1)).collate,  # as a data module
        partial(default_collate),
    ],
)
def test_collation_with_global_random_numbers_is_accepted(collate: Any) -> None:
    assert loader_of(collate_fn=collate).batch_size == 8
