"""Ranks that wait in different operations, and call sites."""

import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from samestep.distributed.collective_check import OperationMonitor, PendingOperation, call_site

Monitors = list[OperationMonitor]


@pytest.fixture
def monitors() -> Iterator[Monitors]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    ranks = [OperationMonitor(store, rank=rank, size=3) for rank in range(3)]
    yield ranks
    for monitor in ranks:
        monitor.end()


def differences(monitors: Monitors, seconds: float = 10) -> list[dict[int, PendingOperation] | None]:
    """Return the differences of all ranks, or None for each after some seconds."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(monitor.difference is None for monitor in monitors):
        time.sleep(0.05)
    return [monitor.difference for monitor in monitors]


def test_every_waiting_rank_finds_another_operation(monitors: Monitors) -> None:
    for monitor in monitors:
        monitor.begin("step 1")
    for rank, monitor in enumerate(monitors):
        monitor.begin("an evaluation" if rank == 2 else "step 2")
    for difference in differences(monitors):
        assert difference is not None
        assert difference[2].name == "an evaluation"
        assert {rank: row.number for rank, row in difference.items()}.items() >= {2: 2}.items()
        assert any(row.name == "step 2" for row in difference.values())
        assert difference[2].line.startswith("tests/unit/distributed/test_collective_check.py:")


def test_ranks_in_one_operation_or_in_none_do_not_differ(monitors: Monitors) -> None:
    monitors[0].begin("step 1")
    for monitor in monitors[:2]:  # rank 0 is one step further
        monitor.begin("step 1" if monitor is monitors[1] else "step 2")
    monitors[2].begin("an evaluation")
    monitors[2].finish()
    assert differences(monitors, seconds=2.5) == [None, None, None]


def test_call_site_is_a_line_of_this_file() -> None:
    file, _, line = call_site().rpartition(":")
    assert file.endswith("test_collective_check.py")
    assert int(line) > 1
