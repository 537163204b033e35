"""Turns, exchanges, random generators and failures of tasks in lockstep."""

import random
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import numpy
import pytest
import torch

from samestep.distributed.rng import preserved_generators, seed_generators
from samestep.engine.microbatch_threads import Task, Threads, Track, run_in_lockstep

CPU = torch.device("cpu")
answer_of: ContextVar[int] = ContextVar("answer_of", default=0)


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads("test")
    yield threads
    threads.end()


def alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("test-")]


def echo(messages: list[Any]) -> list[Any]:
    return list(messages)


def exchanging(rounds: int, log: list[tuple[str, int, int]], number: int) -> Task:
    def task(track: Track) -> None:
        for turn in range(rounds):
            log.append(("before", number, turn))
            log.append((f"received {track.exchange((number, turn))}", number, turn))

    return task


def test_tasks_take_turns_and_receive_the_result_of_the_exchange(threads: Threads) -> None:
    log: list[tuple[str, int, int]] = []
    run_in_lockstep([exchanging(2, log, number) for number in range(3)], echo, CPU, threads)
    first, second = (f"received {[(number, turn) for number in range(3)]}" for turn in range(2))
    assert log == [
        *[("before", number, 0) for number in range(3)],
        *[entry for number in range(3) for entry in ((first, number, 0), ("before", number, 1))],
        *[(second, number, 1) for number in range(3)],
    ]


def test_ended_tasks_contribute_none(threads: Threads) -> None:
    exchanges: list[list[Any]] = []
    run_in_lockstep([exchanging(rounds, [], rounds) for rounds in (1, 2)], exchanges.append, CPU, threads)
    assert exchanges == [[(1, 0), (2, 0)], [None, (2, 1)], [None, None]]


def test_one_task_runs_at_a_time(threads: Threads) -> None:
    running: list[int] = []
    counts: list[int] = []

    def task(track: Track) -> None:
        for _ in range(20):
            running.append(1)
            counts.append(len(running))
            sum(range(1000))
            running.pop()
            track.exchange(0)

    run_in_lockstep([task] * 4, echo, CPU, threads)
    assert max(counts) == 1


def test_each_task_has_separate_generators(threads: Threads) -> None:
    """Tasks draw different amounts; Gaussian numbers are generated in pairs."""

    def drawn(rounds: list[int]) -> list[list[float]]:
        draws: list[list[float]] = [[] for _ in rounds]

        def task(track: Track, number: int) -> None:
            seed_generators(number)
            for _ in range(3):
                for _ in range(rounds[number]):
                    draws[number] += [random.gauss(0, 1), float(numpy.random.normal()), float(torch.randn(()))]
                track.exchange(0)

        run_in_lockstep(
            [lambda track, number=number: task(track, number) for number in range(len(rounds))], echo, CPU, threads
        )
        return draws

    with preserved_generators():
        together, alone = drawn([1, 2, 3]), [drawn([1])[0], drawn([0, 2])[1], drawn([0, 0, 3])[2]]
    assert together == alone


def test_tasks_have_the_thread_state_of_the_caller(threads: Threads) -> None:
    states: list[Any] = []

    def task(track: Track) -> None:
        states.append(
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
    assert states == [inside] * 2 + [outside] * 2


def test_generators_of_the_caller_are_unchanged(threads: Threads) -> None:
    def task(track: Track) -> None:
        seed_generators(7)
        track.exchange(0)
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
            track.exchange(now)

    return task


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("index", range(3))
def test_first_failure_ends_all_tasks(threads: Threads, turn: int, index: int) -> None:
    finished: list[int] = []

    def clean_up(track: Track) -> None:
        try:
            fails_at(9)(track)
        finally:
            finished.append(1)

    tasks: list[Task] = [clean_up] * 3
    tasks[index] = fails_at(turn)
    with pytest.raises(ArithmeticError, match=f"turn {turn}"):
        run_in_lockstep(tasks, echo, CPU, threads)
    assert alive() == []
    assert len(finished) == (2 if turn else index)


def test_task_that_catches_all_exceptions_ends(threads: Threads) -> None:
    def stubborn(track: Track) -> None:
        for _ in range(3):
            try:
                track.exchange(0)
            except BaseException:  # boundary: a model may do this
                continue

    with pytest.raises(ArithmeticError):
        run_in_lockstep([stubborn, fails_at(1)], echo, CPU, threads)
    assert alive() == []


def test_failed_exchange_ends_all_threads(threads: Threads) -> None:
    def refuse(messages: list[Any]) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run_in_lockstep([fails_at(9)] * 3, refuse, CPU, threads)
    assert alive() == []


def test_interrupt_ends_all_threads(threads: Threads, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_threads_are_reused_and_end_with_their_owner() -> None:
    threads = Threads("test")
    identifiers: list[int] = []

    def task(track: Track) -> None:
        identifiers.append(threading.get_ident())

    for _ in range(2):
        run_in_lockstep([task] * 3, echo, CPU, threads)
    assert identifiers[:3] == identifiers[3:]
    assert len(set(identifiers)) == len(alive()) == 3
    del threads
    assert alive() == []


def test_lockstep_works_after_a_failure(threads: Threads) -> None:
    with pytest.raises(ArithmeticError):
        run_in_lockstep([fails_at(1), fails_at(9)], echo, CPU, threads)
    log: list[tuple[str, int, int]] = []
    run_in_lockstep([exchanging(1, log, number) for number in range(2)], echo, CPU, threads)
    assert len(log) == 4
