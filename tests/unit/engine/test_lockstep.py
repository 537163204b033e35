"""Tasks take turns, meet, and end together whatever happens."""

import random
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy
import pytest
import torch

from samestep.engine.lockstep import Task, Track, run_in_lockstep
from samestep.runtime.random_state import preserved_generators, seed_generators
from samestep.runtime.threads import Threads

CPU = torch.device("cpu")
answer_of: ContextVar[int] = ContextVar("answer_of", default=0)


@pytest.fixture
def threads() -> Iterator[Threads]:
    made = Threads("test")
    yield made
    made.end()


def alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("test-")]


def echo(said: list[Any]) -> list[Any]:
    return list(said)


def meeting(rounds: int, log: list[tuple[str, int, int]], number: int) -> Task:
    def task(track: Track) -> None:
        for turn in range(rounds):
            log.append(("before", number, turn))
            log.append((f"heard {track.meet((number, turn))}", number, turn))

    return task


def test_tasks_take_turns_and_hear_what_all_said(threads: Threads) -> None:
    log: list[tuple[str, int, int]] = []
    run_in_lockstep([meeting(2, log, number) for number in range(3)], echo, CPU, threads)
    first, second = (f"heard {[(number, turn) for number in range(3)]}" for turn in range(2))
    assert log == [
        *[("before", number, 0) for number in range(3)],
        *[entry for number in range(3) for entry in ((first, number, 0), ("before", number, 1))],
        *[(second, number, 1) for number in range(3)],
    ]


def test_those_who_ended_say_nothing_and_the_last_meeting_is_empty(threads: Threads) -> None:
    heard: list[list[Any]] = []
    run_in_lockstep([meeting(rounds, [], rounds) for rounds in (1, 2)], heard.append, CPU, threads)
    assert heard == [[(1, 0), (2, 0)], [None, (2, 1)], [None, None]]


def test_only_one_task_runs_at_a_time(threads: Threads) -> None:
    running: list[int] = []
    most: list[int] = []

    def task(track: Track) -> None:
        for _ in range(20):
            running.append(1)
            most.append(len(running))
            sum(range(1000))
            running.pop()
            track.meet(0)

    run_in_lockstep([task] * 4, echo, CPU, threads)
    assert max(most) == 1


def test_each_task_has_the_generators_for_itself(threads: Threads) -> None:
    """With tasks that draw unevenly, and Gaussian numbers, of which two are made at a time."""

    def drawn(rounds: list[int]) -> list[list[float]]:
        found: list[list[float]] = [[] for _ in rounds]

        def task(track: Track, number: int) -> None:
            seed_generators(number)
            for _ in range(3):
                for _ in range(rounds[number]):
                    found[number] += [random.gauss(0, 1), float(numpy.random.normal()), float(torch.randn(()))]
                track.meet(0)

        run_in_lockstep(
            [lambda track, number=number: task(track, number) for number in range(len(rounds))], echo, CPU, threads
        )
        return found

    with preserved_generators():
        together, alone = drawn([1, 2, 3]), [drawn([1])[0], drawn([0, 2])[1], drawn([0, 0, 3])[2]]
    assert together == alone


def test_tasks_see_the_state_of_the_thread_that_runs_them(threads: Threads) -> None:
    found: list[Any] = []

    def task(track: Track) -> None:
        found.append(
            (
                torch.is_grad_enabled(),
                torch.is_autocast_enabled("cpu"),
                torch.get_autocast_dtype("cpu"),
                torch.empty(0).device.type,
                torch.get_num_threads(),
                answer_of.get(),
            )
        )

    token = answer_of.set(42)
    with torch.no_grad(), torch.autocast("cpu", torch.float16), torch.device("meta"):
        run_in_lockstep([task] * 2, echo, CPU, threads)
    answer_of.reset(token)
    run_in_lockstep([task] * 2, echo, CPU, threads)
    inside = (False, True, torch.float16, "meta", torch.get_num_threads(), 42)
    outside = (True, False, torch.get_autocast_dtype("cpu"), "cpu", torch.get_num_threads(), 0)
    assert found == [inside] * 2 + [outside] * 2


def test_the_callers_generators_stay_as_they_were(threads: Threads) -> None:
    def task(track: Track) -> None:
        seed_generators(7)
        track.meet(0)
        draw()

    def draw() -> tuple[float, float, float]:
        return random.gauss(0, 1), float(numpy.random.normal()), float(torch.randn(()))

    with preserved_generators():
        seed_generators(1)
        expected = [draw() for _ in range(4)]
        seed_generators(1)
        drawn = [draw()]
        run_in_lockstep([task] * 2, echo, CPU, threads)
        drawn.append(draw())
        with pytest.raises(ArithmeticError):
            run_in_lockstep([task, fails_at(1)], echo, CPU, threads)
        assert [*drawn, draw(), draw()] == expected


def fails_at(turn: int) -> Task:
    def task(track: Track) -> None:
        for now in range(3):
            if now == turn:
                raise ArithmeticError(f"turn {turn}")
            track.meet(now)

    return task


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("place", range(3))
def test_the_first_failure_ends_all_threads(threads: Threads, turn: int, place: int) -> None:
    tidied: list[int] = []

    def tidy(track: Track) -> None:
        try:
            fails_at(9)(track)
        finally:
            tidied.append(1)

    tasks: list[Task] = [tidy, tidy, tidy]
    tasks[place] = fails_at(turn)
    with pytest.raises(ArithmeticError, match=f"turn {turn}"):
        run_in_lockstep(tasks, echo, CPU, threads)
    assert alive() == []
    assert len(tidied) == (2 if turn else place)


def test_a_task_that_catches_everything_ends_too(threads: Threads) -> None:
    def stubborn(track: Track) -> None:
        for _ in range(3):
            try:
                track.meet(0)
            except BaseException:  # boundary: what a careless model does
                continue

    with pytest.raises(ArithmeticError):
        run_in_lockstep([stubborn, fails_at(1)], echo, CPU, threads)
    assert alive() == []


def test_a_meeting_that_fails_ends_all_threads(threads: Threads) -> None:
    def refuse(said: list[Any]) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run_in_lockstep([fails_at(9)] * 3, refuse, CPU, threads)
    assert alive() == []


def test_an_interrupt_while_a_task_runs_ends_all_threads(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
    wait: Callable[[Track], None] = Track.wait
    calls: list[int] = []

    def interrupted(track: Track) -> None:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        wait(track)

    monkeypatch.setattr(Track, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_in_lockstep([fails_at(9)] * 3, echo, CPU, threads)
    assert alive() == []


def test_threads_stay_for_the_next_step_and_end_with_their_owner() -> None:
    made = Threads("test")
    seen: list[int] = []

    def task(track: Track) -> None:
        seen.append(threading.get_ident())

    for _ in range(2):
        run_in_lockstep([task] * 3, echo, CPU, made)
    assert seen[:3] == seen[3:]
    assert len(set(seen)) == len(alive()) == 3
    del made
    assert alive() == []


def test_after_a_failure_the_next_step_works(threads: Threads) -> None:
    with pytest.raises(ArithmeticError):
        run_in_lockstep([fails_at(1), fails_at(9)], echo, CPU, threads)
    log: list[tuple[str, int, int]] = []
    run_in_lockstep([meeting(1, log, number) for number in range(2)], echo, CPU, threads)
    assert len(log) == 4
