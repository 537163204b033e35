"""Batches without samples for some ranks, at different steps of a run."""

import pytest

from samestep.launcher.launch import launch
from workers.transforms import train_on


@pytest.mark.parametrize(
    ("samples", "batch_size"), [(9, 8), (10, 8), (3, 4)], ids=["step 2, one sample", "step 2, two samples", "step 1"]
)
def test_small_batches_give_the_same_bits_and_do_not_hang(samples: int, batch_size: int) -> None:
    """DDP rebuilds its buckets in the forward of step 2, a collective of all ranks."""
    alone = launch(train_on, samples, batch_size, processes=1)
    assert launch(train_on, samples, batch_size, processes=4, hang_after=20) == alone
