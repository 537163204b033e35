"""Batches that leave ranks without samples, wherever in a run they come."""

import pytest

from ranks_switches import trained_on
from samestep.runtime.launch import launch


@pytest.mark.parametrize(
    ("samples", "batch_size"), [(9, 8), (10, 8), (3, 4)], ids=["in step 2", "two of 4", "in step 1"]
)
def test_they_give_the_same_bits_and_nobody_waits(samples: int, batch_size: int) -> None:
    """DDP makes its buckets anew in the forward of step 2, which takes all ranks."""
    alone = launch(trained_on, samples, batch_size, processes=1)
    assert launch(trained_on, samples, batch_size, processes=4, hang_after=20) == alone
