"""Tests of interval arithmetic, of the phases of a step, and of the slowest rank."""

from itertools import accumulate

import pytest

from samestep.tools.profile import (
    PHASES,
    Interval,
    Measurements,
    Phase,
    PhaseSeconds,
    SlowestRank,
    phase_seconds,
)


def units(intervals: list[Interval]) -> set[int]:
    return {unit for begin, end in intervals for unit in range(int(begin), int(end))}


def phases_of(*phases: tuple[Phase, float], collectives: tuple[Interval, ...] = ()) -> PhaseSeconds:
    """Return the phases of a step of consecutive phases with durations in seconds."""
    begins = accumulate((seconds for _, seconds in phases), initial=0.0)
    names: list[Phase] = [*(name for name, _ in phases), "other"]
    return phase_seconds(list(zip(names, begins, strict=True)), collectives)


def test_phases_add_up_to_the_step() -> None:
    phases = phases_of(("data", 1), ("forward", 2), ("backward", 3), ("optimizer", 5))
    assert (phases["data"], phases["forward"], phases["communication"]) == (1, 2, 0)
    assert sum(phases.values()) == 11


def test_collective_within_forward_is_not_forward() -> None:
    waits = ((1.5, 2.5), (2, 2.5))
    phases = phases_of(("data", 1), ("forward", 2), ("backward", 3), collectives=waits)
    assert (phases["forward"], phases["communication"], sum(phases.values())) == (1, 1, 6)


def measured(*forwards: float, is_known_inside: bool = True) -> Measurements:
    """Return steps of 10 seconds with these forwards of the ranks, the rest of which is communication."""
    zero = dict.fromkeys(PHASES, 0.0)
    return Measurements(
        [{**zero, "data": 1.0, "forward": forward, "communication": 9 - forward} for forward in forwards],
        is_known_inside,
    )


def test_slowest_rank_is_busy_for_longest() -> None:
    assert measured(2, 6, 2).slowest == SlowestRank(1, pytest.approx(4), "forward")
    assert measured(2, 6).step_seconds == 10
