"""A few kills of the soak; `make soak` makes a hundred."""

from pathlib import Path

import pytest

from soak import soak


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_killed_at_random_it_ends_in_the_weights_of_a_run_that_nobody_touched(tmp_path: Path) -> None:
    done = soak(3, seed=1, place=tmp_path)
    assert sum(done.kills.values()) == 3
