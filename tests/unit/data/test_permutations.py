"""Permutations: shuffled and grouped by length; functions of seed and epoch."""

import hashlib

import numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.data.permutations import Indices, global_order, grouped_order

sizes = st.integers(0, 3000)
seeds = st.integers(0, 2**64 - 1)
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
    assert global_order(size, seed=seed, epoch=epoch, shuffle=False) == range(size)


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


batch_sizes = st.integers(1, 40)
some_lengths = st.lists(st.integers(0, 100), max_size=600).map(lambda lengths: numpy.array(lengths, dtype=numpy.int64))


@settings(max_examples=200)
@given(some_lengths, batch_sizes, seeds, epochs, st.booleans())
def test_grouped_order_is_a_permutation(lengths: Indices, batch: int, seed: int, epoch: int, shuffle: bool) -> None:
    order = grouped_order(lengths, batch, seed=seed, epoch=epoch, shuffle=shuffle)
    assert order.dtype == numpy.int64
    assert sorted(order.tolist()) == list(range(len(lengths)))


@given(some_lengths, batch_sizes, seeds, epochs)
def test_order_is_a_function_of_seed_epoch_lengths_and_batch_size(
    lengths: Indices, batch: int, seed: int, epoch: int
) -> None:
    before = numpy.random.get_state()[1].tolist()
    first, second = (grouped_order(lengths.copy(), batch, seed=seed, epoch=epoch, shuffle=True) for _ in range(2))
    assert first.tolist() == second.tolist()
    assert numpy.random.get_state()[1].tolist() == before


@given(some_lengths, batch_sizes, seeds, epochs)
def test_batches_are_sorted_and_the_last_one_is_drawn_from_all(
    lengths: Indices, batch: int, seed: int, epoch: int
) -> None:
    order = grouped_order(lengths, batch, seed=seed, epoch=epoch, shuffle=True)
    for start in range(0, len(order), batch):
        assert (numpy.diff(lengths[order[start : start + batch]]) >= 0).all()
    rest = len(lengths) % batch
    plain = global_order(len(lengths), seed=seed, epoch=epoch, shuffle=True)
    assert set(order[len(order) - rest :].tolist()) == set(plain[len(order) - rest :].tolist())


def test_without_shuffle_samples_are_sorted_stably_by_length() -> None:
    lengths = numpy.array([3, 1, 2, 1, 3])
    assert grouped_order(lengths, 2, seed=0, epoch=5, shuffle=False).tolist() == [1, 3, 2, 0, 4]


def test_grouped_order_is_stable_between_versions() -> None:
    lengths = numpy.array([5, 3, 9, 3, 1, 7, 7, 2, 8, 4, 6])
    assert grouped_order(lengths, 2, seed=0, epoch=0, shuffle=True).tolist() == [0, 5, 4, 8, 10, 6, 9, 2, 7, 1, 3]
    orders = [
        grouped_order(lengths, 2, seed=seed, epoch=epoch, shuffle=True) for seed, epoch in [(0, 0), (0, 1), (1, 0)]
    ]
    assert len({tuple(order.tolist()) for order in orders}) == 3
