"""`differences` reports each kind of leak."""

import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

from helpers.leaks import differences, snapshot
from samestep.distributed.world import World


def test_no_difference_without_a_change() -> None:
    before = snapshot()
    assert differences(before, snapshot()) == []


def test_added_variable_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot()
    monkeypatch.setenv("SAMESTEP_TEST", "1")
    assert differences(before, snapshot()) == ["environment variable SAMESTEP_TEST"]


def test_removed_variable_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot()
    monkeypatch.delenv(next(name for name in os.environ if name != "PYTEST_CURRENT_TEST"))
    assert len(differences(before, snapshot())) == 1


def test_thread_is_reported() -> None:
    before, done = snapshot(), threading.Event()
    thread = threading.Thread(target=done.wait, name="left")
    thread.start()
    try:
        assert differences(before, snapshot()) == ["thread left"]
    finally:
        done.set()
        thread.join()


def test_process_is_reported() -> None:
    before = snapshot()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        leaks = differences(before, snapshot())
        assert process.stdin is not None
        process.communicate(b"\n")
    assert leaks == [f"process {process.pid}"]


def test_grandchild_is_reported() -> None:
    before = snapshot()
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the grandchild runs
        leaks = differences(before, snapshot())
        process.communicate(b"\n")
    assert len(leaks) == 2


def test_mode_is_reported() -> None:
    before = snapshot()
    with torch.no_grad():
        assert differences(before, snapshot()) == ["torch's gradient mode"]


def test_process_group_is_reported(alone: World) -> None:
    during = snapshot()
    assert during.has_group
    assert differences(replace(during, has_group=False), during) == ["a process group"]
