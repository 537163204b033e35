"""A run is started again for what may not come again, as often as it is allowed, on ranks that are there."""

import pytest

from samestep.errors import InputError
from samestep.runtime.crew import RankError
from samestep.runtime.failure import Failure
from samestep.runtime.restarts import Restarts


def failed(kind: str | None = None, *, by_signal: int | None = None, exit_code: int = 1) -> RankError:
    return RankError(Failure(1, 0.0, "error: rank 1 went away\nmore", exit_code, kind=kind, by_signal=by_signal))


def test_it_is_started_again_as_often_as_allowed() -> None:
    restarts = Restarts(2, 4, 4)
    assert restarts.again(failed(by_signal=9), 5) == "restart 1 of 2, on 4 processes: rank 1 went away"
    assert restarts.again(failed(by_signal=9), 6) == "restart 2 of 2, on 4 processes: rank 1 went away"
    assert restarts.again(failed(by_signal=9), 7) is None


def test_it_is_not_started_again_unless_asked() -> None:
    assert Restarts(0, 4, 4).again(failed(by_signal=9), 5) is None


@pytest.mark.parametrize("kind", ["NonFiniteError", "CheckpointWriteError"])
def test_what_would_come_again_is_not_tried_again(kind: str) -> None:
    assert Restarts(5, 4, 4).again(failed(kind), 5) is None


def test_bad_input_is_not_tried_again() -> None:
    assert Restarts(5, 4, 4).again(failed("InputError", exit_code=2), 5) is None


def test_the_same_failure_at_the_same_step_is_tried_again_once() -> None:
    restarts = Restarts(5, 4, 4)
    assert restarts.again(failed("ValueError"), 5)
    assert restarts.again(failed("ValueError"), 5) is None


def test_another_failure_or_another_step_is_another_matter() -> None:
    restarts = Restarts(5, 4, 4)
    for error, step in ((failed("ValueError"), 5), (failed("KeyError"), 5), (failed("KeyError"), 8)):
        assert restarts.again(error, step)


def test_a_rank_that_is_lost_at_the_same_step_may_be_lost_by_chance() -> None:
    restarts = Restarts(3, 4, 4)
    for lost in (failed(by_signal=9), failed(by_signal=9), failed("hang")):
        assert restarts.again(lost, 5)


def test_lost_ranks_are_done_without_and_taken_back() -> None:
    restarts = Restarts(9, 2, 4)
    assert not restarts.is_short
    counts = []
    for lost in (failed(by_signal=9), failed("hang"), failed(by_signal=11)):
        restarts.again(lost, 5)
        counts.append(restarts.processes)
    assert counts == [3, 2, 2], "never below the minimum"
    assert restarts.is_short
    assert restarts.grow() == "a checkpoint is there: going on with 4 processes"
    assert not restarts.is_short


def test_who_raised_is_not_lost() -> None:
    restarts = Restarts(9, 2, 4)
    assert restarts.again(failed("ValueError"), 5) == "restart 1 of 9, on 4 processes: rank 1 went away"


@pytest.mark.parametrize("bounds", [(-1, 1, 1), (0, 3, 2), (0, 0, 2)])
def test_bounds_that_cannot_be(bounds: tuple[int, int, int]) -> None:
    with pytest.raises(InputError, match="rule: "):
        Restarts(*bounds)
