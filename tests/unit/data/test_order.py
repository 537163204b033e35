"""Global order: a permutation, a function of seed and epoch, stable between versions."""

import hashlib

import numpy
from hypothesis import given
from hypothesis import strategies as st

from samestep.data.order import global_order
from samestep.data.permutation import Indices

sizes = st.integers(0, 3000)
seeds = st.integers(0, 2**63)
epochs = st.integers(0, 10**6)


def digest(order: Indices) -> str:
    return hashlib.sha256(order.astype("<i8").tobytes()).hexdigest()


@given(sizes, seeds, epochs)
def test_order_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    order = global_order(size, seed=seed, epoch=epoch, shuffle=True)
    assert order.dtype == numpy.int64
    assert sorted(order.tolist()) == list(range(size))


@given(sizes, seeds, epochs)
def test_without_shuffle_the_order_is_that_of_the_dataset(size: int, seed: int, epoch: int) -> None:
    assert global_order(size, seed=seed, epoch=epoch, shuffle=False)[:].tolist() == list(range(size))


@given(sizes, seeds, epochs)
def test_order_is_a_function_of_seed_and_epoch(size: int, seed: int, epoch: int) -> None:
    first, second = (global_order(size, seed=seed, epoch=epoch, shuffle=True) for _ in range(2))
    assert first.tolist() == second.tolist()


def test_order_does_not_change_the_generators() -> None:
    before = numpy.random.get_state()[1].tolist()
    global_order(100, seed=0, epoch=0, shuffle=True)
    assert numpy.random.get_state()[1].tolist() == before


def test_order_is_stable_between_versions() -> None:
    assert global_order(10, seed=0, epoch=0, shuffle=True).tolist() == [8, 4, 1, 7, 6, 0, 5, 9, 2, 3]
    assert digest(global_order(50_000, seed=3, epoch=7, shuffle=True)) == (
        "7f55bfa5b51de6dff5b550359dd4e94fe38aa7b31eba741caefc9460ace194e1"
    )


def test_epochs_and_seeds_have_different_orders() -> None:
    digests = {
        digest(global_order(50, seed=seed, epoch=epoch, shuffle=True)) for seed in range(20) for epoch in range(20)
    }
    assert len(digests) == 400


def test_positions_of_samples_are_uniform() -> None:
    orders = [global_order(20, seed=1, epoch=epoch, shuffle=True) for epoch in range(2000)]
    mean_position = numpy.mean([numpy.argsort(order) for order in orders], axis=0)
    # The position of a sample has mean 9.5 and deviation 5.77; the mean of 2000 positions deviates by 0.13.
    assert abs(mean_position - 9.5).max() < 0.6
