"""Number of microbatches of a batch with fewer samples."""

from hypothesis import given
from hypothesis import strategies as st

from samestep.data.microbatch_dataset import microbatches_of_short_batch
from samestep.microbatches import microbatch_bounds


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 40))
def test_short_batch_has_microbatches_of_two_samples_or_more(size: int, rest: int, microbatches: int) -> None:
    batch_size = max(size + rest, microbatches)
    number = microbatches_of_short_batch(size, batch_size, microbatches)
    smallest = min(stop - start for start, stop in microbatch_bounds(size, number))
    assert 1 <= number <= microbatches
    assert smallest >= min(size, 2)
    assert number == microbatches or size // microbatches < 2
