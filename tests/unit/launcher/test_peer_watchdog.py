"""Peer watchdog: the end of a rank whose output has no reader."""

import io
import sys

import pytest
import torch.distributed as dist

from samestep.launcher import peer_watchdog
from samestep.launcher.failure import Failure
from samestep.launcher.job import Job
from samestep.launcher.peer_watchdog import PeerWatchdog


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
    watchdog._report_and_exit(Failure.of_hang(0, "rank 0 hangs [E_HANG]", "in engine.step 7"))
    assert codes == [1]
