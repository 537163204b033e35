"""A few kills of the soak; `make soak` makes a hundred. `test_kill_and_resume.py` has some at random moments too."""

from pathlib import Path

import pytest

from helpers.soak import soak


@pytest.mark.long
@pytest.mark.timeout(300)
def test_killed_at_random_the_run_ends_with_the_weights_of_an_uninterrupted_run(tmp_path: Path) -> None:
    done = soak(5, seed=1, place=tmp_path)
    assert sum(done.kills.values()) == 5


@pytest.mark.long
@pytest.mark.timeout(300)
def test_stopped_in_a_pipeline_at_random_the_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    done = soak(5, seed=1, place=tmp_path, in_pipeline=True)
    assert sum(done.kills.values()) == 5
