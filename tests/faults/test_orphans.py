"""No process of a run outlives its launcher, and processes that the code of a rank leaves behind are ended or named."""

import re
import signal
import time
from pathlib import Path

import pytest

from helpers.orphans import STATES, kill_launcher_of_blocked_rank, rank_1, start
from helpers.surroundings import RecordFault, nothing_left_behind, require_bounded, wait_for_end


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow if kind == "stopped" else pytest.mark.long) for kind in STATES]
)
def test_killed_launcher_with_a_blocked_rank_leaves_no_process(
    kind: str, tmp_path: Path, record_fault: RecordFault
) -> None:
    kill_launcher_of_blocked_rank(tmp_path, kind)
    record_fault(f"the launcher is killed while a rank is {kind}", "killed; no process after 10 s")


LEFT_BEHIND = {
    "subprocess": pytest.mark.slow,
    "fork": pytest.mark.long,
    "exception": pytest.mark.long,
}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=mark) for kind, mark in LEFT_BEHIND.items()])
def test_process_that_a_rank_leaves_behind_is_ended(kind: str, tmp_path: Path, record_fault: RecordFault) -> None:
    with start(tmp_path, kind) as running, nothing_left_behind(running, tmp_path):
        rank_1(running, tmp_path)
        done = wait_for_end(running, time.monotonic())
    assert done.code == (kind == "exception")
    require_bounded(done.err)
    assert re.search(r"^ended 1 process: \d+ ", done.err, re.MULTILINE), done.err
    name = {"fork": "fork", "subprocess": "subprocess", "exception": "subprocess, and raises"}[kind]
    record_fault(f"a rank leaves a {name}", f"exit code {done.code}; `ended 1 process: ...`")


@pytest.mark.long
def test_process_in_a_session_of_its_own_is_named(tmp_path: Path, record_fault: RecordFault) -> None:
    with start(tmp_path, "session") as running:
        rank_1(running, tmp_path)
        done = wait_for_end(running, time.monotonic())
        (left,) = running.processes()
        assert f"1 process: {left} (sleep 1000), which a rank had started, runs on in a session of its own" in done.err
    assert done.code == 0
    observed = "exit code 0; `1 process: ..., which a rank had started, runs on in a session of its own`"
    record_fault("a rank leaves a process in a session of its own", observed)


@pytest.mark.long
def test_thread_that_keeps_a_rank_alive_is_named_and_ended(tmp_path: Path, record_fault: RecordFault) -> None:
    with start(tmp_path, "thread", "--hang-after", "5s") as running, nothing_left_behind(running, tmp_path):
        rank_1(running, tmp_path)
        done = running.wait(30)
    assert done.code == 0, done.err
    assert (
        "the function of rank 1 has returned; the rank waits for its threads and child processes: 'upload'" in done.err
    )
    assert re.search("ended rank 1, which waited [5-9] s for its threads and child processes: 'upload'", done.err)
    observed = "exit code 0; `the rank waits for its threads and child processes: 'upload'`, then `ended rank 1`"
    record_fault("a thread of a rank runs on, --hang-after", observed)


@pytest.mark.long
def test_ctrl_c_ends_a_rank_that_waits_for_its_threads(tmp_path: Path, record_fault: RecordFault) -> None:
    with start(tmp_path, "thread") as running, nothing_left_behind(running, tmp_path):
        rank_1(running, tmp_path)
        running.until(lambda: len(running.processes()) == 4, "rank 0 has ended")  # launcher, server, tracker, rank 1
        time.sleep(0.5)
        fault = time.monotonic()
        running.kill_group(signal.SIGINT)
        done = wait_for_end(running, fault)
    assert done.code == 130, done.err
    record_fault("a thread of a rank runs on, then Ctrl-C", "exit code 130")
