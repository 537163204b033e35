"""A few kills of the soak; `make soak` makes a hundred. `test_kill_and_resume.py` has some at random moments too."""

from pathlib import Path

import pytest

from helpers.soak import soak


@pytest.mark.parametrize(
    "subject",
    [
        pytest.param("recipe", marks=pytest.mark.long),
        pytest.param("loop", marks=pytest.mark.long),
        pytest.param("script", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(300)
def test_killed_at_random_a_run_ends_with_the_weights_of_an_uninterrupted_one(subject: str, tmp_path: Path) -> None:
    done = soak(3, seed=1, place=tmp_path, subject=subject)
    assert sum(done.kills.values()) == 3


@pytest.mark.long
@pytest.mark.timeout(300)
def test_stopped_in_a_pipeline_at_random_the_run_ends_with_the_same_weights(tmp_path: Path) -> None:
    done = soak(5, seed=1, place=tmp_path, in_pipeline=True)
    assert sum(done.kills.values()) == 5
