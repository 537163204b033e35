"""Tests of late ranks, which are identified by arrival times instead of durations."""

import pytest

from helpers.profile_steps import all_reduce, make_step, measured
from samestep.tools.profile.measurements import Collective, Lateness, Step
from samestep.tools.profile.straggler import straggler_of


def reducing_step(begin: float, forward: float, end: float) -> Step:
    """Return a step of a forward and an all-reduce that ends when the last rank has arrived."""
    arrival = begin + forward
    phases = ("forward", forward), ("communication", end - arrival)
    return make_step(*phases, begin=begin, collectives=(all_reduce(arrival, end),))


def test_others_wait_for_the_last_rank() -> None:
    ranks = [[reducing_step(begin, 2 if rank == 1 else 1, begin + 2.25) for begin in (0, 10, 20)] for rank in range(3)]
    lateness = Lateness.of(ranks)
    assert (lateness.steps, lateness.apart, lateness.last) == (3, 3, [0, 3, 0])
    assert lateness.caused == pytest.approx([0, 1, 0])
    assert lateness.waited == pytest.approx([1, 0, 1])
    late = straggler_of(measured(*ranks))
    assert late is not None
    assert (late.rank, late.phase, late.last, late.apart) == (1, "forward", 3, 3)
    assert (late.seconds, late.more) == (pytest.approx(1), pytest.approx(1))


def test_ranks_that_are_late_in_turn_are_not_stragglers() -> None:
    ranks = [
        [reducing_step(begin, 2 if begin / 10 % 2 == rank else 1, begin + 2.25) for begin in (0, 10)] for rank in (0, 1)
    ]
    assert Lateness.of(ranks).last == [1, 1]
    assert straggler_of(measured(*ranks)) is None


def test_wait_during_backward_costs_nothing() -> None:
    first = make_step(("backward", 3), ("communication", 0.1), collectives=(all_reduce(1, 3.1),))
    second = make_step(("backward", 3), ("communication", 0.1), collectives=(all_reduce(3, 3.1),))
    lateness = Lateness.of([[first], [second]])
    assert lateness.last == [0, 1]
    assert lateness.caused == [0, 0]


def test_ranks_with_different_collectives_are_not_compared() -> None:
    other = make_step(("forward", 1), collectives=(Collective("a broadcast", None, True, 0, 1),))
    ranks = [reducing_step(0, 1, 2)], [other]
    assert Lateness.of(ranks).steps == 0
    assert straggler_of(measured(*ranks)) is None
