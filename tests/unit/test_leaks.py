"""The picture that `leaves_nothing` compares shows each kind of leak."""

import os
import subprocess
import sys
import threading
from dataclasses import replace

import pytest
import torch

import samestep
from leaks import differences, picture


def test_nothing_differs_where_nothing_happened() -> None:
    before = picture()
    assert differences(before, picture()) == []


def test_a_variable_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = picture()
    monkeypatch.setenv("SAMESTEP_TEST", "1")
    assert differences(before, picture()) == ["environment variable SAMESTEP_TEST"]


def test_a_removed_variable_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = picture()
    monkeypatch.delenv(next(name for name in os.environ if name != "PYTEST_CURRENT_TEST"))
    assert len(differences(before, picture())) == 1


def test_a_thread_is_noticed() -> None:
    before, done = picture(), threading.Event()
    thread = threading.Thread(target=done.wait, name="left")
    thread.start()
    try:
        assert differences(before, picture()) == ["thread left"]
    finally:
        done.set()
        thread.join()


def test_a_process_is_noticed() -> None:
    before = picture()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        found = differences(before, picture())
        assert process.stdin is not None
        process.communicate(b"\n")
    assert found == [f"process {process.pid}"]


def test_a_grandchild_is_noticed() -> None:
    before = picture()
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the grandchild is there
        found = differences(before, picture())
        process.communicate(b"\n")
    assert len(found) == 2


def test_a_mode_is_noticed() -> None:
    before = picture()
    with torch.no_grad():
        assert differences(before, picture()) == ["torch's gradient mode"]


def test_a_process_group_is_noticed(alone: samestep.World) -> None:
    during = picture()
    assert during.has_group
    assert differences(replace(during, has_group=False), during) == ["a process group"]
