"""Order grouped by length: similar lengths share a global batch; a permutation independent of ranks."""

from typing import Any

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.drawing_datasets import Draws, jittered
from samestep.data.loader import Loader
from samestep.data.order import Indices, global_order, grouped_order
from samestep.errors import InputError
from samestep.microbatches import Cursor
from unit.data.test_loader import arguments_and_cursor, epoch_of, start_world, used

seeds, epochs, batch_sizes = st.integers(0, 2**63), st.integers(0, 10**6), st.integers(1, 40)
some_lengths = st.lists(st.integers(0, 100), max_size=600).map(lambda lengths: numpy.array(lengths, dtype=numpy.int64))


@settings(max_examples=200)
@given(some_lengths, batch_sizes, seeds, epochs, st.booleans())
def test_order_is_a_permutation(lengths: Indices, batch: int, seed: int, epoch: int, shuffle: bool) -> None:
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


def test_order_is_stable_between_versions() -> None:
    lengths = numpy.array([5, 3, 9, 3, 1, 7, 7, 2, 8, 4, 6])
    assert grouped_order(lengths, 2, seed=0, epoch=0, shuffle=True).tolist() == [0, 5, 4, 8, 10, 6, 9, 2, 7, 1, 3]
    orders = [
        grouped_order(lengths, 2, seed=seed, epoch=epoch, shuffle=True) for seed, epoch in [(0, 0), (0, 1), (1, 0)]
    ]
    assert len({tuple(order.tolist()) for order in orders}) == 3


@settings(max_examples=100)
@given(arguments_and_cursor(), st.data())
def test_ranks_together_use_the_order_from_any_cursor(drawn: dict[str, Any], data: st.DataObject) -> None:
    """The remaining samples are the same for any cursor and number of ranks."""
    drawn["lengths"] = data.draw(st.lists(st.integers(1, 9), min_size=drawn["size"], max_size=drawn["size"]))
    cursor, lengths = drawn["cursor"], numpy.array(drawn["lengths"])
    order = grouped_order(lengths, drawn["batch_size"], seed=5, epoch=cursor.epoch, shuffle=drawn["shuffle"])
    assert used(epoch_of(**drawn)) == order[cursor.samples :].tolist()


class CountingDraws(Draws):
    """Dataset that counts its loaded samples."""

    loaded = 0

    def __getitem__(self, index: int, /) -> Any:
        self.loaded += 1
        return super().__getitem__(index)


def test_resume_does_not_load_earlier_samples() -> None:
    data = CountingDraws(1000)
    loader = Loader(
        data,
        batch_size=10,
        microbatches=5,
        world=start_world(0, 1),
        shuffle=True,
        collate_fn=jittered,
        lengths=range(1000),
    )
    loader.cursor = Cursor(3, 980)
    assert len(list(loader)) == 2
    assert data.loaded == 20


def test_wrong_number_of_lengths_raises() -> None:
    with pytest.raises(InputError, match="there are 3 lengths for 4 samples"):
        Loader(Draws(4), batch_size=2, microbatches=1, world=start_world(0, 1), lengths=[1, 2, 3])
