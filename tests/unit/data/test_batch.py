"""Global batches: samples of each microbatch; transfer of tensors to devices."""

import numpy
from hypothesis import given
from hypothesis import strategies as st

from samestep.data.batch import GlobalBatch
from samestep.microbatches import Cursor


def batch_of(size: int, microbatches: int) -> GlobalBatch:
    return GlobalBatch(Cursor(), Cursor(0, size), numpy.arange(size)[::-1] + 100, microbatches, ())


@given(st.integers(1, 300), st.integers(1, 40))
def test_microbatches_are_slices_of_the_batch_in_order(size: int, microbatches: int) -> None:
    batch = batch_of(size, microbatches)
    assert [
        sample for microbatch in range(microbatches) for sample in batch.samples_of(microbatch)
    ] == batch.indices.tolist()
    assert batch.size == size


@given(st.integers(1, 300), st.integers(1, 40))
def test_filled_counts_microbatches_that_have_samples(size: int, microbatches: int) -> None:
    batch = batch_of(size, microbatches)
    assert batch.filled == sum(bool(batch.samples_of(microbatch)) for microbatch in range(microbatches))


def test_samples_are_integers() -> None:
    assert [type(sample) for sample in batch_of(3, 1).samples_of(0)] == [int] * 3
