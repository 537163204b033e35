"""Watchdog: culprits of a hang, and stacks of another process."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.process import BaseProcess

import pytest

from samestep.distributed.status import StatusSnapshot
from samestep.launcher.watchdog import Hang, RankState, StackFile, Watchdog, parse_stack

LONG_AGO = -100.0
WAITING = StatusSnapshot(7, LONG_AGO, activity="in step 6, waiting in an all-reduce", is_waiting=True)
COMPUTING = StatusSnapshot(7, LONG_AGO, activity="in step 6")
BEHIND = StatusSnapshot(6, LONG_AGO, activity="after step 5")


def states(*statuses: StatusSnapshot) -> dict[int, RankState]:
    return {rank: RankState(status) for rank, status in enumerate(statuses)}


def culprits(ranks: dict[int, RankState], stacks: dict[int, list[str]] | None = None) -> list[int]:
    return Hang(12, 10, ranks, stacks or {}).culprits


ELSEWHERE = replace(WAITING, activity="in an evaluation, waiting in an all-reduce")
ENDED = replace(WAITING, is_finished=True)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        pytest.param(states(BEHIND, WAITING, BEHIND, WAITING), [0, 2], id="fewer operations"),
        pytest.param(states(WAITING, replace(WAITING, operations=6), WAITING), [1], id="fewer operations, and waits"),
        pytest.param(states(WAITING, COMPUTING, WAITING, WAITING), [1], id="does not wait"),
        pytest.param({**states(WAITING, WAITING), 2: RankState(WAITING, process_state="T")}, [2], id="stopped"),
        pytest.param(states(WAITING, WAITING, ENDED, WAITING), [2], id="has left the world"),
        pytest.param({**states(WAITING, WAITING), 2: RankState(WAITING, has_ended=True)}, [2], id="has ended"),
        pytest.param(states(ELSEWHERE, WAITING, WAITING, WAITING), [0], id="another operation"),
        pytest.param(states(ELSEWHERE, WAITING), [], id="no majority"),
        pytest.param(states(COMPUTING, COMPUTING), [], id="no rank waits"),
    ],
)
def test_culprits(ranks: dict[int, RankState], expected: list[int]) -> None:
    assert culprits(ranks) == expected


def test_rank_in_a_collective_of_the_user_is_waiting() -> None:
    stacks = {rank: ["train.py:9 main", "/x/torch/distributed/distributed_c10d.py:1 all_reduce"] for rank in (0, 1, 3)}
    ahead = replace(WAITING, operations=8, activity="after end of samestep.init(), waiting in a barrier")
    assert culprits(states(BEHIND, BEHIND, ahead, BEHIND), stacks) == [2]


def hang_seconds(
    monkeypatch: pytest.MonkeyPatch, checks: list[float], ranks: Callable[[float], dict[int, RankState]]
) -> list[float | None]:
    """Return the results of a watchdog with a limit of 10 s that checks at these times."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    watchdog, results = Watchdog(10), []
    for now in checks:
        results.append(watchdog.hang_seconds(ranks(now)))
    return results


def test_no_progress_of_any_rank_is_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    every_second = [float(second) for second in range(14)]
    results = hang_seconds(monkeypatch, every_second, lambda now: states(WAITING, COMPUTING))
    assert results == [None] * 10 + [10, 11, 12, 13]


@pytest.mark.parametrize(
    "ranks",
    [
        pytest.param(lambda now: states(WAITING, replace(COMPUTING, last_change=now)), id="progress of one rank"),
        pytest.param(
            lambda now: states(replace(COMPUTING, is_resting=True), replace(COMPUTING, is_resting=True)),
            id="all in code of a plain loop",
        ),
        pytest.param(lambda now: states(StatusSnapshot(), StatusSnapshot()), id="before the start"),
        pytest.param(lambda now: states(ENDED, ENDED), id="after the end"),
    ],
)
def test_no_hang(monkeypatch: pytest.MonkeyPatch, ranks: Callable[[float], dict[int, RankState]]) -> None:
    every_second = [float(second) for second in range(30)]
    assert hang_seconds(monkeypatch, every_second, ranks) == [None] * 30


def test_pause_of_the_watchdog_itself_is_no_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    results = hang_seconds(monkeypatch, [0, 1, 2, 1000, 1001, 1002, 1500], lambda now: states(WAITING, COMPUTING))
    assert results == [None] * 7
    seconds = [float(second) for second in (0, 1, 500, *range(501, 512))]
    results = hang_seconds(monkeypatch, seconds, lambda now: states(WAITING, COMPUTING))
    assert results[-5:] == [10.5, 11.5, 12.5, 13.5, 14.5]


def test_report_has_the_culprit_first_and_each_stack_once() -> None:
    stacks = {0: ["a.py:1 f", "b.py:2 g"], 1: ["a.py:9 f"], 2: ["a.py:1 f", "b.py:2 g"]}
    text = Hang(12.34, 10, states(WAITING, BEHIND, WAITING), stacks).failure().text
    head, *lines = text.splitlines()
    assert head == "error: rank 1 hangs: no progress for 12.3 s [E_HANG]"
    assert lines == [
        "    rank 1: after step 5",
        "    ranks 0 and 2: in step 6, waiting in an all-reduce",
        "  stack of rank 1, innermost last:",
        "    a.py:9 f",
        "  stack of ranks 0 and 2, innermost last:",
        "    a.py:1 f",
        "    b.py:2 g",
        "  expected: every rank completes a step within 10 s (--hang-after)",
        "  fix:      look at the innermost frames of rank 1; for slow steps set a longer limit: --hang-after, "
        "launch(hang_after=...) or init(timeout=...)",
    ]


def test_rank_that_does_not_answer_has_no_stack() -> None:
    ranks = states(WAITING, WAITING)
    ranks[1] = RankState(BEHIND, process_state="T")
    text = Hang(12, 10, ranks, {0: ["a.py:1 f"], 1: []}).failure().text
    assert "rank 1: after step 5; stopped by a signal" in text
    assert "none: the process does not answer" in text


# --- stacks -------------------------------------------------------------------------------------------


DUMP = """\
Thread 0x00007f1 [helper] (most recent call first):
  File "/x/threading.py", line 10 in wait

Thread 0x00007f2 (most recent call first):
  File "/x/train.py", line 9 in step
  File "/x/train.py", line 3 in main
  File "/x/samestep/launcher/worker.py", line 99 in _call
  File "/x/samestep/launcher/worker.py", line 80 in run_rank
"""


def test_stack_of_the_main_thread_or_of_the_crashed_one() -> None:
    assert parse_stack(DUMP) == ["/x/train.py:3 main", "/x/train.py:9 step"]
    crashed = DUMP.replace("Thread 0x00007f1", "Current thread 0x00007f1")
    assert parse_stack(f"Fatal Python error: Segmentation fault\n\n{crashed}") == ["/x/threading.py:10 wait"]
    assert parse_stack("") == []


def sleep_forever(stacks: StackFile, ready: str) -> None:
    stacks.install()
    os.close(os.open(ready, os.O_CREAT))
    time.sleep(1000)


def crash(stacks: StackFile, ready: str) -> None:
    stacks.install()
    os.kill(os.getpid(), signal.SIGSEGV)


@contextmanager
def running(function: object, stacks: StackFile, ready: str) -> Iterator[BaseProcess]:
    process = multiprocessing.get_context("spawn").Process(target=function, args=(stacks, ready))  # type: ignore[arg-type]
    process.start()
    try:
        yield process
    finally:
        process.kill()
        process.join()
        process.close()
        stacks.close()


def test_sleeping_process_answers_every_request_and_a_stopped_one_none(
    tmp_path: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samestep.launcher.watchdog._STACK_SECONDS", 20)
    stacks, ready = StackFile(), f"{tmp_path}/ready"
    with running(sleep_forever, stacks, ready) as process:
        while not os.path.exists(ready):
            time.sleep(0.01)
        time.sleep(0.1)
        assert process.pid is not None
        for _ in range(2):
            assert "sleep_forever" in stacks.request(process.pid)[-1]
        os.kill(process.pid, signal.SIGSTOP)
        monkeypatch.setattr("samestep.launcher.watchdog._STACK_SECONDS", 1)
        assert stacks.request(process.pid) == []


def test_crash_leaves_a_stack(tmp_path: object) -> None:
    stacks = StackFile()
    with running(crash, stacks, f"{tmp_path}/ready") as process:
        process.join()
        assert process.exitcode == -signal.SIGSEGV
        assert "crash" in stacks.crash()[-1]
