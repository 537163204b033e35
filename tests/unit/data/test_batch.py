"""A global batch knows the samples of each of its shards."""

import numpy
from hypothesis import given
from hypothesis import strategies as st

from samestep.cursor import Cursor
from samestep.data.batch import GlobalBatch


def batch_of(size: int, shards: int) -> GlobalBatch:
    return GlobalBatch(Cursor(), Cursor(0, size), numpy.arange(size)[::-1] + 100, shards, ())


@given(st.integers(1, 300), st.integers(1, 40))
def test_shards_are_the_batch_in_order(size: int, shards: int) -> None:
    batch = batch_of(size, shards)
    assert [sample for shard in range(shards) for sample in batch.samples_of(shard)] == batch.indices.tolist()
    assert batch.size == size


@given(st.integers(1, 300), st.integers(1, 40))
def test_filled_counts_shards_that_have_samples(size: int, shards: int) -> None:
    batch = batch_of(size, shards)
    assert batch.filled == sum(bool(batch.samples_of(shard)) for shard in range(shards))


def test_samples_are_plain_numbers() -> None:
    assert [type(sample) for sample in batch_of(3, 1).samples_of(0)] == [int] * 3
