"""Permutations: shuffled, keyed and grouped by length; functions of seed and epoch."""

import hashlib

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.data.permutations import DatasetOrder, Indices, KeyedPermutation, global_order, grouped_order

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
    assert global_order(size, seed=seed, epoch=epoch, shuffle=False)[:].tolist() == list(range(size))


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


@settings(max_examples=60)
@given(st.integers(0, 5000), seeds, epochs)
def test_every_index_occurs_once(size: int, seed: int, epoch: int) -> None:
    indices = KeyedPermutation(size, seed=seed, epoch=epoch)[:]
    assert indices.dtype == numpy.int64
    assert sorted(indices.tolist()) == list(range(size))


@given(st.integers(1, 2**63 - 1), seeds, st.data())
def test_indices_of_large_ranges_are_distinct_and_inside(size: int, seed: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, size - 1))
    indices = KeyedPermutation(size, seed=seed, epoch=0)[start : start + 200]
    assert len(set(indices.tolist())) == len(indices) == min(200, size - start)
    assert 0 <= indices.min() <= indices.max() < size


@settings(max_examples=30)
@given(st.integers(1, 300), seeds, st.slices(300))
def test_slices_are_those_of_the_whole_order(size: int, seed: int, positions: slice) -> None:
    for order in (KeyedPermutation(size, seed=seed, epoch=1), DatasetOrder(size)):
        assert order[positions].tolist() == order[:][positions].tolist()
        assert len(order) == size


def test_permutation_is_stable_between_versions() -> None:
    assert KeyedPermutation(10, seed=0, epoch=0)[:].tolist() == [2, 5, 9, 4, 6, 0, 3, 7, 1, 8]
    last = KeyedPermutation(10**9, seed=3, epoch=7)[999_999_995:]
    assert last.tolist() == [
        479568709,
        183735647,
        503252426,
        852304362,
        806901040,
    ]
    order = KeyedPermutation(50_000, seed=3, epoch=7)[:]
    assert hashlib.sha256(order.astype("<i8").tobytes()).hexdigest() == (
        "c5548f82c42bc120eb2dbda7360284a21ca64714d5d326c621819f414f5c7f8f"
    )


def test_seeds_epochs_and_sizes_have_independent_orders() -> None:
    orders = {
        tuple((KeyedPermutation(size, seed=seed, epoch=epoch)[:50]).tolist())
        for size in (1000, 1001)
        for seed in range(10)
        for epoch in range(10)
    }
    assert len(orders) == 200


@pytest.mark.parametrize("size", [5000, 1 << 17, 10**9])
def test_blocks_of_positions_spread_over_blocks_of_indices(size: int) -> None:
    blocks, per_block = 16, 4096 if size > 10**6 else size // 16
    counts = numpy.zeros((blocks, blocks))
    for epoch in range(4):
        order = KeyedPermutation(size, seed=2, epoch=epoch)
        for block in range(blocks):
            start = size * block // blocks
            counts[block] += numpy.bincount(order[start : start + per_block] * blocks // size, minlength=blocks)
    expected = 4 * per_block / blocks
    # Chi-square with at most 240 degrees of freedom: deviation 22.
    assert 100 < ((counts - expected) ** 2 / expected).sum() < 360


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
