"""Models with batch norm and short last batches: the same bits on any number of processes, and no crash."""

import pytest

from samestep.launcher.launch import launch
from workers.short_batches import train_on_each

# The last batch has 2, 3, 5, 7 and 9 samples; 4 microbatches of it would have a single sample, or none.
SIZES = (18, 19, 21, 23, 25)


@pytest.mark.parametrize(
    "processes", [pytest.param(2, marks=pytest.mark.long), 3, pytest.param(4, marks=pytest.mark.slow)]
)
def test_short_batch_gives_the_same_bits(processes: int) -> None:
    alone = launch(train_on_each, SIZES, processes=1)
    assert [microbatches for _, microbatches in alone.values()] == [
        [4, 1, 4, 1],
        [4, 1, 4, 1],
        [4, 1, 4, 1],
        [4, 1, 4, 1],
        [4, 4, 4, 4],
    ]
    assert launch(train_on_each, SIZES, processes=processes, hang_after=20) == alone
