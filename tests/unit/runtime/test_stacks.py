"""Stacks of another process, asked for from outside."""

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess

import pytest

from samestep.runtime.stacks import StackFile, frames

DUMP = """\
Thread 0x00007f1 [helper] (most recent call first):
  File "/x/threading.py", line 10 in wait

Thread 0x00007f2 (most recent call first):
  File "/x/train.py", line 9 in step
  File "/x/train.py", line 3 in main
  File "/x/samestep/runtime/rank.py", line 99 in _call
  File "/x/samestep/runtime/rank.py", line 80 in run_rank
"""


def test_the_main_thread_is_read_outermost_first() -> None:
    assert frames(DUMP) == ["/x/train.py:3 main", "/x/train.py:9 step"]


def test_the_thread_that_crashed_comes_before_the_main_one() -> None:
    crashed = DUMP.replace("Thread 0x00007f1", "Current thread 0x00007f1")
    assert frames(f"Fatal Python error: Segmentation fault\n\n{crashed}") == ["/x/threading.py:10 wait"]


def test_nothing_is_read_from_nothing() -> None:
    assert frames("") == []


def sleep_for_ever(stacks: StackFile, ready: str) -> None:
    stacks.listen()
    os.close(os.open(ready, os.O_CREAT))
    time.sleep(1000)


def crash(stacks: StackFile, ready: str) -> None:
    stacks.listen()
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


def test_a_process_that_sleeps_tells_where_each_time_it_is_asked(tmp_path: object) -> None:
    stacks, ready = StackFile(), f"{tmp_path}/ready"
    with running(sleep_for_ever, stacks, ready) as process:
        while not os.path.exists(ready):
            time.sleep(0.01)
        time.sleep(0.1)
        assert process.pid is not None
        for _ in range(2):
            assert "sleep_for_ever" in stacks.ask(process.pid)[-1]


def test_a_process_that_is_stopped_does_not_answer(tmp_path: object) -> None:
    stacks, ready = StackFile(), f"{tmp_path}/ready"
    with running(sleep_for_ever, stacks, ready) as process:
        while not os.path.exists(ready):
            time.sleep(0.01)
        assert process.pid is not None
        os.kill(process.pid, signal.SIGSTOP)
        assert stacks.ask(process.pid) == []


@pytest.mark.parametrize("number", [signal.SIGSEGV])
def test_a_crash_leaves_its_stack(tmp_path: object, number: signal.Signals) -> None:
    stacks = StackFile()
    with running(crash, stacks, f"{tmp_path}/ready") as process:
        process.join()
        assert process.exitcode == -number
        assert "crash" in stacks.crash()[-1]
