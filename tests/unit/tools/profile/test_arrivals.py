"""Who is late is told by when ranks come, not by how long they stay."""

import pytest

from profile_steps import measured, step, summed
from samestep.tools.profile.arrivals import waiting
from samestep.tools.profile.steps import Meeting, Step
from samestep.tools.profile.straggler import straggler


def one_step(begin: float, forward: float, over: float) -> Step:
    """Forward, then a sum that is over when the last rank has come."""
    came = begin + forward
    return step(("forward", forward), ("communication", over - came), begin=begin, meetings=(summed(came, over),))


def test_the_others_wait_for_who_comes_last() -> None:
    ranks = [[one_step(begin, 2 if rank == 1 else 1, begin + 2.25) for begin in (0, 10, 20)] for rank in range(3)]
    found = waiting(ranks)
    assert (found.steps, found.apart, found.last) == (3, 3, [0, 3, 0])
    assert found.seconds == pytest.approx([0, 1, 0])
    assert found.own == pytest.approx([1, 0, 1])
    late = straggler(measured(*ranks))
    assert late is not None
    assert (late.rank, late.phase, late.last, late.apart) == (1, "forward", 3, 3)
    assert (late.seconds, late.more) == (pytest.approx(1), pytest.approx(1))


def test_ranks_that_are_late_by_turns_are_no_stragglers() -> None:
    ranks = [
        [one_step(begin, 2 if begin / 10 % 2 == rank else 1, begin + 2.25) for begin in (0, 10)] for rank in (0, 1)
    ]
    assert waiting(ranks).last == [1, 1]
    assert straggler(measured(*ranks)) is None


def test_a_wait_beside_backward_costs_nothing() -> None:
    first = step(("backward", 3), ("communication", 0.1), meetings=(summed(1, 3.1),))
    second = step(("backward", 3), ("communication", 0.1), meetings=(summed(3, 3.1),))
    found = waiting([[first], [second]])
    assert found.last == [0, 1]
    assert found.seconds == [0, 0]


def test_ranks_that_do_not_meet_in_the_same_way_are_not_compared() -> None:
    other = step(("forward", 1), meetings=(Meeting("a broadcast", None, True, 0, 1),))
    found = waiting([[one_step(0, 1, 2)], [other]])
    assert found.steps == 0
    assert straggler(measured([one_step(0, 1, 2)], [other])) is None
