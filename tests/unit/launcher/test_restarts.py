"""Decision after a failure: restart, and number of ranks."""

import pytest

from samestep.errors import InputError
from samestep.launcher.failure import Failure, RankError, RestartPolicy


def failed(
    kind: str | None = None, *, by_signal: int | None = None, exit_code: int = 1, is_stopping: bool = False
) -> RankError:
    failure = Failure(1, 0.0, "error: rank 1 ended\nmore", exit_code, kind=kind, by_signal=by_signal)
    return RankError(failure, is_stopping=is_stopping)


def test_restarts_up_to_the_limit() -> None:
    policy = RestartPolicy(2, 4, 4)
    assert policy.restart(failed(by_signal=9), 5) == "restart 1 of 2, on 4 processes: rank 1 ended"
    assert policy.restart(failed(by_signal=9), 6) == "restart 2 of 2, on 4 processes: rank 1 ended"
    assert policy.restart(failed(by_signal=9), 7) is None


@pytest.mark.parametrize(
    ("limit", "error"),
    [
        pytest.param(0, failed(by_signal=9), id="no restart by default"),
        pytest.param(5, failed("NonFiniteError"), id="permanent failure"),
        pytest.param(5, failed("CheckpointWriteError"), id="permanent failure of the disk"),
        pytest.param(5, failed("InputError", exit_code=2), id="invalid input"),
        pytest.param(5, failed("OSError", is_stopping=True), id="after a request to stop"),
        pytest.param(5, failed(by_signal=9, is_stopping=True), id="killed after a request to stop"),
    ],
)
def test_not_restarted(limit: int, error: RankError) -> None:
    assert RestartPolicy(limit, 4, 4).restart(error, 5) is None


def test_same_failure_at_the_same_step_is_restarted_once() -> None:
    policy = RestartPolicy(5, 4, 4)
    assert policy.restart(failed("ValueError"), 5)
    assert policy.restart(failed("ValueError"), 5) is None


def test_other_failure_or_other_step_is_restarted() -> None:
    policy = RestartPolicy(5, 4, 4)
    for error, step in ((failed("ValueError"), 5), (failed("KeyError"), 5), (failed("KeyError"), 8)):
        assert policy.restart(error, step)


def test_lost_rank_at_the_same_step_is_restarted() -> None:
    policy = RestartPolicy(3, 4, 4)
    for lost in (failed(by_signal=9), failed(by_signal=9), failed("hang")):
        assert policy.restart(lost, 5)


def test_lost_ranks_are_dropped_and_return() -> None:
    policy = RestartPolicy(9, 2, 4)
    assert not policy.is_short
    counts = []
    for lost in (failed(by_signal=9), failed("hang"), failed(by_signal=11)):
        policy.restart(lost, 5)
        counts.append(policy.processes)
    assert counts == [3, 2, 2], "never below the minimum"
    assert policy.is_short
    assert policy.grow() == "checkpoint written: continuing on 4 processes"
    assert not policy.is_short


def test_rank_that_raised_is_not_dropped() -> None:
    policy = RestartPolicy(9, 2, 4)
    assert policy.restart(failed("ValueError"), 5) == "restart 1 of 9, on 4 processes: rank 1 ended"


@pytest.mark.parametrize("bounds", [(-1, 1, 1), (0, 3, 2), (0, 0, 2)])
def test_invalid_bounds_are_rejected(bounds: tuple[int, int, int]) -> None:
    with pytest.raises(InputError, match="E_LAUNCH"):
        RestartPolicy(*bounds)
