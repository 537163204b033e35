"""What a rank writes into its slot is what its launcher reads."""

import multiprocessing
import os
import time
from collections.abc import Callable

import pytest

from samestep.runtime.board import Board, Position, own_pulse
from shared_memory import abandoned, require_none_left
from system import until


def test_a_slot_that_nobody_has_written_says_nothing() -> None:
    board = Board.create(2)
    assert board.read(1) == Position()
    board.close()


def test_every_rank_has_a_slot_of_its_own() -> None:
    board = Board.create(3)
    for rank in range(3):
        with board.pulse(rank).during(f"engine.step {rank}"):
            pass
    assert [board.read(rank).text for rank in range(3)] == [f"after engine.step {rank}" for rank in range(3)]
    board.close()


def test_a_position_tells_what_is_done_and_whether_it_waits() -> None:
    board = Board.create(1)
    pulse = board.pulse(0)
    with pulse.during("engine.step 7"):
        assert board.read(0).text == "in engine.step 7"
        with pulse.during("engine.evaluate"):
            assert board.read(0).text == "in engine.step 7", "what is inside has no name of its own"
        pulse.arrive(2)
        with pulse.waiting("an all-reduce"):
            inside = board.read(0)
    after = board.read(0)
    assert (inside.text, inside.waits) == ("in engine.step 7, waiting in an all-reduce", True)
    assert (inside.begun, inside.steps, inside.shards) == (1, 1, 2)
    assert (after.text, after.waits, after.begun) == ("after engine.step 7", False, 1)
    assert inside.since <= after.since <= time.monotonic()
    board.close()


def test_where_it_failed_stays() -> None:
    pulse = own_pulse()
    try:
        with pulse.during("engine.step 7"), pulse.waiting("a barrier"):
            raise ValueError
    except ValueError:
        assert pulse.text == "in engine.step 7"


def test_checkpoints_and_the_end_are_told() -> None:
    board = Board.create(1)
    pulse = board.pulse(0)
    pulse.save()
    assert (board.read(0).saved, board.read(0).is_over) == (1, False)
    pulse.end()
    assert board.read(0).is_over
    board.close()


def test_a_text_that_is_too_long_is_cut() -> None:
    board = Board.create(2)
    with board.pulse(0).during("é" * 1000):
        assert board.read(0).text.startswith("in éé")
    assert board.read(1) == Position()
    board.close()


def write(board: Board) -> None:
    with board.pulse(1).during("something else"):
        os._exit(0)


def test_it_is_seen_from_another_process_and_leaves_no_file() -> None:
    before = abandoned()
    board = Board.create(2)
    process = multiprocessing.get_context("spawn").Process(target=write, args=(board,))
    process.start()
    process.join()
    assert board.read(1).text == "in something else", "a rank that is gone is seen as it stood"
    board.close()
    require_none_left(before)


def tick(board: Board) -> None:
    pulse = board.pulse(0)
    with pulse.during("engine.step 7"):
        while not board.read(1).is_over:
            pulse.tick()


def test_what_is_read_while_it_is_written_belongs_together() -> None:
    """A reader that saw the zeros of a slot being written said that ranks had hung since the machine was started."""
    board = Board.create(2)
    process = multiprocessing.get_context("spawn").Process(target=tick, args=(board,))
    process.start()
    until(lambda: board.read(0).begun > 0, "it has begun", 60)
    seen, first, end = [], time.monotonic(), time.monotonic() + 1
    while time.monotonic() < end:
        seen.append(board.read(0))
    board.pulse(1).end()
    process.join(60)
    board.close()
    assert process.exitcode == 0
    assert {(each.begun, each.text) for each in seen} == {(1, "in engine.step 7")}
    times = [each.since for each in seen]
    assert times == sorted(times)
    assert first - 1 < times[0] < times[-1] <= end + 1


def test_waits_in_several_threads_at_once_count_once() -> None:
    pulse = own_pulse()
    assert pulse.waited_seconds == 0
    began = time.monotonic()
    with pulse.waiting("a barrier"):
        with pulse.waiting("an all-reduce"):
            time.sleep(0.1)
        inside, passed = pulse.waited_seconds, time.monotonic() - began
        time.sleep(0.1)
    waited = pulse.waited_seconds
    assert 0.1 <= inside <= passed
    assert inside + 0.1 <= waited <= time.monotonic() - began
    time.sleep(0.05)
    assert pulse.waited_seconds == waited


def test_who_listens_hears_when_waits_begin_and_end() -> None:
    pulse, told = own_pulse(), []

    def hear(what: str) -> Callable[[], None]:
        told.append(f"begin {what}")
        return lambda: told.append(f"end {what}")

    with pulse.waiting("a barrier"):
        pass
    pulse.on_wait = hear
    with pytest.raises(KeyError), pulse.waiting("an all-reduce"):
        raise KeyError
    assert told == ["begin an all-reduce", "end an all-reduce"]
