"""Orders of samples: functions of seed, epoch and lengths; and samplers, which belong to a loader of torch."""

import hashlib
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

import samestep
from samestep.data.epoch_order import Indices, grouped_order, shuffled_order
from samestep.errors import InputError

DATA = TensorDataset(torch.arange(48.0))
RANDOM = RandomSampler(DATA)

seeds = st.integers(0, 2**64 - 1)
epochs = st.integers(0, 10**6)
batch_sizes = st.integers(1, 40)
some_lengths = st.lists(st.integers(0, 100), max_size=600).map(lambda lengths: numpy.array(lengths, dtype=numpy.int64))


def digest(order: Indices) -> str:
    return hashlib.sha256(order.astype("<i8").tobytes()).hexdigest()


@given(st.integers(0, 3000), seeds, epochs)
def test_order_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    order = shuffled_order(size, seed=seed, epoch=epoch)
    assert order.dtype == numpy.int64
    assert sorted(order.tolist()) == list(range(size))


def test_order_is_stable_between_versions() -> None:
    assert shuffled_order(10, seed=0, epoch=0).tolist() == [8, 4, 1, 7, 6, 0, 5, 9, 2, 3]
    assert digest(shuffled_order(50_000, seed=3, epoch=7)) == (
        "7f55bfa5b51de6dff5b550359dd4e94fe38aa7b31eba741caefc9460ace194e1"
    )


def test_epochs_and_seeds_have_different_orders() -> None:
    digests = {digest(shuffled_order(50, seed=seed, epoch=epoch)) for seed in range(20) for epoch in range(20)}
    assert len(digests) == 400


@settings(max_examples=200)
@given(some_lengths, batch_sizes, seeds, epochs)
def test_grouped_batches_are_sorted_and_the_last_one_is_drawn_from_all(
    lengths: Indices, batch: int, seed: int, epoch: int
) -> None:
    before = numpy.random.get_state()[1].tolist()
    order = grouped_order(lengths, batch, seed=seed, epoch=epoch)
    assert numpy.random.get_state()[1].tolist() == before
    assert grouped_order(lengths.copy(), batch, seed=seed, epoch=epoch).tolist() == order.tolist()
    assert order.dtype == numpy.int64
    assert sorted(order.tolist()) == list(range(len(lengths)))
    for start in range(0, len(order), batch):
        assert (numpy.diff(lengths[order[start : start + batch]]) >= 0).all()
    rest = len(lengths) % batch
    plain = shuffled_order(len(lengths), seed=seed, epoch=epoch)
    assert set(order[len(order) - rest :].tolist()) == set(plain[len(order) - rest :].tolist())


def test_grouped_order_is_stable_between_versions() -> None:
    lengths = numpy.array([5, 3, 9, 3, 1, 7, 7, 2, 8, 4, 6])
    orders = [grouped_order(lengths, 2, seed=seed, epoch=epoch).tolist() for seed, epoch in [(0, 0), (0, 1), (1, 0)]]
    assert orders[0] == [0, 5, 4, 8, 10, 6, 9, 2, 7, 1, 3]
    assert len({tuple(order) for order in orders}) == 3


def test_without_shuffle_the_order_is_that_of_the_data_set_or_of_lengths() -> None:
    data = [0, 1, 2, 3, 4]
    assert torch.cat(list(samestep.loader(data, 2))).tolist() == data
    assert torch.cat(list(samestep.loader(data, 2, lengths=[3, 1, 2, 1, 3]))).tolist() == [1, 3, 2, 0, 4]


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
