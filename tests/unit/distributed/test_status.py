"""Status board: statuses written by ranks are read consistently, from other processes too."""

import multiprocessing
import os
import time
from collections.abc import Iterator

import pytest

from helpers.shared_memory import abandoned, require_none_left
from helpers.system import until
from samestep.distributed.status import StatusBoard, local_rank_status, odd_ranks


@pytest.fixture
def board() -> Iterator[StatusBoard]:
    board = StatusBoard(3)
    yield board
    board.close()


def test_every_rank_has_its_own_slot(board: StatusBoard) -> None:
    for rank in range(3):
        with board.rank_status(rank).operation(f"step {rank}"):
            pass
    assert [board.read(rank).activity for rank in range(3)] == [f"after step {rank}" for rank in range(3)]


def test_snapshot_has_activity_counts_and_waits(board: StatusBoard) -> None:
    status = board.rank_status(0)
    with status.operation("step 7"):
        assert board.read(0).activity == "in step 7"
        with status.operation("an evaluation"):
            assert board.read(0).activity == "in step 7", "nested operations are not recorded"
        status.end_step()
        with status.waiting("an all-reduce"):
            inside = board.read(0)
    after = board.read(0)
    assert (inside.activity, inside.is_waiting) == ("in step 7, waiting in an all-reduce", True)
    assert (inside.operations, inside.steps) == (1, 1)
    assert (after.activity, after.is_waiting, after.operations) == ("after step 7", False, 1)
    assert inside.last_change <= after.last_change <= time.monotonic()


def test_rank_of_a_plain_loop_rests_between_its_calls(board: StatusBoard) -> None:
    status = board.rank_status(0)
    status.is_free = True
    seen = []
    with status.operation("samestep.init()"), status.waiting("the rendezvous"):
        seen.append(board.read(0).is_resting)
    seen.append(board.read(0).is_resting)
    with status.waiting("an all-reduce"):
        seen.append(board.read(0).is_resting)
    seen.append(board.read(0).is_resting)
    assert seen == [False, True, False, True]


def test_script_without_operations_shows_its_steps(board: StatusBoard) -> None:
    status = board.rank_status(0)
    with status.operation("samestep.init()"):
        pass
    status.show_steps()
    activities = [board.read(0).activity]
    for _ in range(2):
        status.end_step()
        activities.append(board.read(0).activity)
    assert activities == ["before the first optimizer step", "after optimizer step 1", "after optimizer step 2"]


def test_the_end_is_recorded(board: StatusBoard) -> None:
    status = board.rank_status(0)
    assert not board.read(0).is_finished
    status.finish()
    assert board.read(0).is_finished
    assert not board.read(0).is_script
    status.begin_script()
    assert board.read(0).is_script
    with status.operation("samestep.init()"):
        assert not board.read(0).is_finished, "the rank has entered a second world"


def write(board: StatusBoard) -> None:
    with board.rank_status(1).operation("something else"):
        os._exit(0)


def test_status_of_an_ended_process_is_visible_and_no_file_remains() -> None:
    before = abandoned()
    board = StatusBoard(2)
    process = multiprocessing.get_context("spawn").Process(target=write, args=(board,))
    process.start()
    process.join()
    assert board.read(1).activity == "in something else"
    board.close()
    require_none_left(before)


def send_heartbeats(board: StatusBoard) -> None:
    status = board.rank_status(0)
    with status.operation("step 7"):
        while not board.read(1).is_finished:
            status.heartbeat()


def test_reads_during_writes_are_consistent(board: StatusBoard) -> None:
    """A reader that sees the zeros of a half-written slot would report a hang since the boot of the machine."""
    process = multiprocessing.get_context("spawn").Process(target=send_heartbeats, args=(board,))
    process.start()
    until(lambda: board.read(0).operations > 0, "the first operation", 60)
    snapshots, first, end = [], time.monotonic(), time.monotonic() + 1
    while time.monotonic() < end or snapshots[0].last_change == snapshots[-1].last_change:
        snapshots.append(board.read(0))
    end = time.monotonic()
    board.rank_status(1).finish()
    process.join(60)
    assert process.exitcode == 0
    assert {(snapshot.operations, snapshot.activity) for snapshot in snapshots} == {(1, "in step 7")}
    times = [snapshot.last_change for snapshot in snapshots]
    assert times == sorted(times)
    assert first - 5 < times[0] < times[-1] <= end + 1


def test_simultaneous_waits_count_once() -> None:
    status = local_rank_status()
    assert status.waited_seconds == 0
    began = time.monotonic()
    with status.waiting("a barrier"):
        with status.waiting("an all-reduce"):
            time.sleep(0.1)
        inside, passed = status.waited_seconds, time.monotonic() - began
        time.sleep(0.1)
    waited = status.waited_seconds
    assert 0.1 <= inside <= passed
    assert inside + 0.1 <= waited <= time.monotonic() - began
    time.sleep(0.05)
    assert status.waited_seconds == waited


@pytest.mark.parametrize(
    ("values", "odd"),
    [
        ("aaaa", []),
        ("aaba", [2]),
        ("baaa", [0]),
        ("abcaa", [1, 2]),
        ("ab", []),
        ("aabb", []),
        ("aabc", []),
        ("abc", []),
    ],
)
def test_odd_ranks_differ_from_a_strict_majority(values: str, odd: list[int]) -> None:
    assert odd_ranks(dict(enumerate(values))) == odd
