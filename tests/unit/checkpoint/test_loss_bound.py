"""Saves are asked for early enough that a kill costs no more than was allowed."""

import random

import pytest

from samestep.checkpoint.loss_bound import LossBound


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_without_a_bound_nothing_is_asked_for() -> None:
    assert not LossBound(None).is_due(1e9)


def test_it_is_due_when_waiting_for_the_next_chance_would_be_too_late() -> None:
    bound = LossBound(10.0, clock := Clock())
    clock.now += 6
    assert not bound.is_due(3.9)
    assert bound.is_due(4.0)
    bound.begin_save()
    assert not bound.is_due(9.9)
    bound.end_save(2.0)
    assert not bound.is_due(7.9)
    assert bound.is_due(8.0)


def test_the_longest_of_the_last_saves_counts() -> None:
    bound = LossBound(10.0, Clock())
    for seconds in (5.0, 1.0):
        bound.end_save(seconds)
    assert bound.is_due(5.0)
    for _ in range(8):
        bound.end_save(1.0)
    assert not bound.is_due(8.9)


def test_a_save_that_takes_longer_than_the_bound_is_told_once() -> None:
    bound = LossBound(1.0)
    assert [bound.end_save(seconds) for seconds in (0.9, 1.1, 0.5, 1.2)] == [False, True, False, False]
    assert not LossBound(None).end_save(1e9)


@pytest.mark.parametrize("seed", range(5))
def test_a_kill_at_any_moment_costs_no_more_than_the_bound(seed: int) -> None:
    """Steps of up to half a second, saves of one to two, beside training; the bound is ten seconds."""
    draw = random.Random(seed)
    bound = LossBound(10.0, clock := Clock())
    bound.end_save(2.0)  # what saves take is known
    safe, writing, step, worst = clock.now, None, 0.5, 0.0
    for _ in range(2000):
        wants = bound.is_due(2 * step)
        step = draw.uniform(0.1, 0.5)
        clock.now += step
        if writing is not None and writing[0] <= clock.now:
            worst = max(worst, writing[0] - safe)
            safe, writing = writing[1], None
            bound.end_save(2.0)
        if wants and writing is None:
            writing = (clock.now + draw.uniform(1.0, 2.0), clock.now)
            bound.begin_save()
    assert 9.0 < worst <= 10.0 + 0.5  # the last step may take longer than the one before it
