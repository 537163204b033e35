"""Peer watchdog: processes that have ended, and the end of a rank whose output has no reader."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from helpers.system import until
from samestep.launcher import peer_watchdog
from samestep.launcher.failure import Failure
from samestep.launcher.peer_watchdog import PeerWatchdog
from samestep.launcher.process_state import Job
from samestep.launcher.watchdog import is_running


class _Unread(io.StringIO):
    """Standard error whose reader is gone."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_rank_ends_without_a_reader_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    codes: list[int] = []
    monkeypatch.setattr(peer_watchdog, "exit_process", codes.append)
    monkeypatch.setattr(sys, "stderr", _Unread())
    watchdog = object.__new__(PeerWatchdog)
    watchdog._job = Job(0, 1, dist.HashStore(), 0, ("127.0.0.1", 1), launcher_has_store=False, hang_after=1.0)
    watchdog._report_and_exit(Failure.of_hang(0, "rank 0 hangs [E_HANG]", "in step 7"))
    assert codes == [1]


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_ended_process_does_not_run() -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read()
        until(lambda: not is_running(process.pid), "the process is a zombie", 10)
    assert not is_running(process.pid)
