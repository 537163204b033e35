"""Checkpoint interval: a kill loses at most the given amount of work."""

import random

import pytest

from samestep.recipes.checkpoints import CheckpointInterval


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_save_is_due_if_the_next_opportunity_is_too_late() -> None:
    interval = CheckpointInterval(10.0, clock := Clock())
    clock.now += 6
    assert not interval.is_due(3.9)
    assert interval.is_due(4.0)
    interval.begin_save()
    assert not interval.is_due(9.9)
    interval.end_save(2.0)
    assert not interval.is_due(7.9)
    assert interval.is_due(8.0)


def test_the_longest_of_the_last_saves_counts() -> None:
    interval = CheckpointInterval(10.0, Clock())
    for seconds in (5.0, 1.0):
        interval.end_save(seconds)
    assert interval.is_due(5.0)
    for _ in range(8):
        interval.end_save(1.0)
    assert not interval.is_due(8.9)


@pytest.mark.parametrize("seed", range(5))
def test_lost_work_stays_below_the_bound(seed: int) -> None:
    """Steps take up to 0.5 s, background saves 1 to 2 s; the interval is 10 s."""
    draw = random.Random(seed)
    interval = CheckpointInterval(10.0, clock := Clock())
    interval.end_save(2.0)  # duration of saves
    saved, writing, step, worst = clock.now, None, 0.5, 0.0
    for _ in range(2000):
        is_due = interval.is_due(2 * step)
        step = draw.uniform(0.1, 0.5)
        clock.now += step
        if writing is not None and writing[0] <= clock.now:
            worst = max(worst, writing[0] - saved)
            saved, writing = writing[1], None
            interval.end_save(2.0)
        if is_due and writing is None:
            writing = (clock.now + draw.uniform(1.0, 2.0), clock.now)
            interval.begin_save()
    assert 9.0 < worst <= 10.0 + 0.5  # the last step may take longer than the one before it


def test_a_save_longer_than_the_bound_is_reported_once() -> None:
    interval = CheckpointInterval(1.0)
    assert [interval.end_save(seconds) for seconds in (0.9, 1.1, 0.5, 1.2)] == [False, True, False, False]
    assert not CheckpointInterval(None).end_save(1e9)
