"""Samples of like length share a global batch, and the order is still a permutation that no rank has a part in."""

from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drawing_datasets import Draws, jittered
from samestep.cursor import Cursor
from samestep.data.loader import Loader
from samestep.data.order import Indices, global_order, grouped_order
from samestep.errors import InputError
from samestep.sharding import shard_bounds
from unit.data.test_loader import epoch_of, used, world_of

seeds, epochs, batch_sizes = st.integers(0, 2**63), st.integers(0, 10**6), st.integers(1, 40)
some_lengths = st.lists(st.integers(0, 100), max_size=600).map(lambda found: numpy.array(found, dtype=numpy.int64))


@settings(max_examples=200)
@given(some_lengths, batch_sizes, seeds, epochs, st.booleans())
def test_every_sample_is_there_once(lengths: Indices, batch: int, seed: int, epoch: int, shuffle: bool) -> None:
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


@given(st.integers(1, 300), batch_sizes, seeds, epochs)
def test_equal_lengths_leave_the_members_of_each_window_to_chance(size: int, batch: int, seed: int, epoch: int) -> None:
    lengths = numpy.zeros(size, dtype=numpy.int64)
    order = grouped_order(lengths, batch, seed=seed, epoch=epoch, shuffle=True)
    plain = global_order(size, seed=seed, epoch=epoch, shuffle=True)
    batches = {tuple(plain[start : start + batch].tolist()) for start in range(0, size, batch)}
    assert {tuple(order[start : start + batch].tolist()) for start in range(0, size, batch)} == batches


def test_without_shuffle_it_goes_from_short_to_long_and_ties_stay() -> None:
    lengths = numpy.array([3, 1, 2, 1, 3])
    assert grouped_order(lengths, 2, seed=0, epoch=5, shuffle=False).tolist() == [1, 3, 2, 0, 4]


def test_order_never_changes() -> None:
    lengths = numpy.array([5, 3, 9, 3, 1, 7, 7, 2, 8, 4, 6])
    assert grouped_order(lengths, 2, seed=0, epoch=0, shuffle=True).tolist() == [0, 5, 4, 8, 10, 6, 9, 2, 7, 1, 3]


def padded_share(order: Indices, lengths: Indices, batch: int, shards: int) -> float:
    """The share of places that are padding when each shard is padded to its longest sample."""
    places = 0
    for start in range(0, len(order), batch):
        inside = order[start : start + batch]
        for first, last in shard_bounds(len(inside), shards):
            places += (last - first) * int(lengths[inside[first:last]].max(initial=0))
    return 1 - int(lengths.sum()) / places


def test_little_is_padded() -> None:
    lengths = numpy.random.Generator(numpy.random.Philox(3)).integers(1, 500, 20_011)
    plain = padded_share(global_order(len(lengths), seed=1, epoch=0, shuffle=True), lengths, 32, 8)
    grouped = padded_share(grouped_order(lengths, 32, seed=1, epoch=0, shuffle=True), lengths, 32, 8)
    assert plain > 0.3
    assert grouped < 0.01


def test_which_samples_meet_differs_by_epoch_and_seed() -> None:
    lengths = numpy.arange(64) % 16
    met = []
    for seed, epoch in [(0, 0), (0, 1), (1, 0)]:
        order = grouped_order(lengths, 4, seed=seed, epoch=epoch, shuffle=True)
        met.append({frozenset(order[start : start + 4].tolist()) for start in range(0, 64, 4)})
    assert len(met[0] & met[1]) < 8
    assert len(met[0] & met[2]) < 8


def test_short_and_long_come_early_and_late_equally_often() -> None:
    lengths = numpy.arange(100)
    places = numpy.zeros(100)
    for epoch in range(2000):
        places[grouped_order(lengths, 5, seed=1, epoch=epoch, shuffle=True)] += numpy.arange(100) / 2000
    # The mean place of a sample is 49.5 with deviation 28.9; the mean of 2000 of them deviates by 0.65.
    assert abs(places - 49.5).max() < 3.3


@st.composite
def situations(draw: st.DrawFn) -> dict[str, Any]:
    size, shards = draw(st.integers(1, 50)), draw(st.integers(1, 8))
    return {
        "size": size,
        "shards": shards,
        "batch_size": draw(st.integers(shards, 24)),
        "shuffle": draw(st.booleans()),
        "ranks": draw(st.integers(1, shards)),
        "cursor": Cursor(draw(st.integers(0, 3)), draw(st.integers(0, size - 1))),
        "lengths": draw(st.lists(st.integers(1, 9), min_size=size, max_size=size)),
    }


@settings(max_examples=100)
@given(situations())
def test_ranks_together_use_the_order_from_any_cursor_on(situation: dict[str, Any]) -> None:
    """Wherever a run is resumed, and on however many ranks, what is left is the tail of the same order."""
    cursor, lengths = situation["cursor"], numpy.array(situation["lengths"])
    order = grouped_order(lengths, situation["batch_size"], seed=5, epoch=cursor.epoch, shuffle=situation["shuffle"])
    assert used(epoch_of(**situation)) == order[cursor.samples :].tolist()


class Counted(Draws):
    """Counts the samples that are asked for."""

    asked = 0

    def __getitem__(self, index: int, /) -> Any:
        self.asked += 1
        return super().__getitem__(index)


def test_resuming_makes_no_sample_that_was_used_before() -> None:
    data = Counted(1000)
    loader = Loader(
        data, batch_size=10, shards=5, world=world_of(0, 1), shuffle=True, collate=jittered, lengths=range(1000)
    )
    loader.cursor = Cursor(3, 980)
    assert len(list(loader)) == 2
    assert data.asked == 20


def test_lengths_of_other_samples_are_refused() -> None:
    with pytest.raises(InputError, match="there are 3 lengths for 4 samples"):
        Loader(Draws(4), batch_size=2, shards=1, world=world_of(0, 1), lengths=[1, 2, 3])
