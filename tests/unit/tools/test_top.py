"""State of a run from the ends of its files: events, and ranks that are active, silent or missing."""

import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from helpers.run_folders import START, events_of, make_run, step_event
from samestep.checkpoint.folder_lock import LOCK
from samestep.tools.top import SILENT_SECONDS, RunStatus, read_status, render


def status_of(folder: Path, events: list[dict[str, Any]]) -> RunStatus:
    status = read_status(make_run(folder, events))
    assert status is not None
    return status


def write_rank(folder: Path, rank: int, *, age: float = 0.0, **changes: Any) -> None:
    line = {"time": time.time() - age, "rank": rank, "host": socket.gethostname(), "pid": os.getpid(), "step": 1}
    path = folder / "ranks" / f"rank-{rank}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"{json.dumps({**line, **changes})}\n" + '{"time": 1', encoding="utf-8")
    os.utime(path, (time.time() - age,) * 2)


def signs(status: RunStatus | None) -> Mapping[int, str]:
    assert status is not None
    return {row.rank: row.sign for row in status.ranks}


def test_progress_and_values(tmp_path: Path) -> None:
    status = status_of(tmp_path, events_of(20)[:-1])
    assert (status.state, status.epoch, status.epochs) == ("dead", 2, 3)
    assert (status.step, status.steps) == (20, 30)
    assert status.loss == step_event(20, START)["loss"]


def test_run_with_an_active_rank_is_running(tmp_path: Path) -> None:
    make_run(tmp_path, events_of(20)[:-1])
    write_rank(tmp_path, 0)
    status = read_status(tmp_path)
    assert status is not None
    assert status.state == "running"


@pytest.mark.parametrize(
    ("event", "state"),
    [
        ({"event": "end", "stopped": False}, "ended"),
        ({"event": "end", "stopped": True}, "stopped"),
        ({"event": "failure", "code": "E_NONFINITE", "text": "the loss is nan", "exit_code": 1}, "failed"),
        ({"event": "resume", "step": 5}, "dead"),
    ],
)
def test_last_event_decides_the_state(event: dict[str, Any], state: str, tmp_path: Path) -> None:
    end = {"time": START, "event": "end", "stopped": False}
    status = status_of(tmp_path, [step_event(5, START), end, {"time": START, **event}])
    assert status.state == state
    assert status.failure.get("code") == ("E_NONFINITE" if state == "failed" else None)


def test_signs_of_ranks(tmp_path: Path) -> None:
    """The start has two ranks; without their number, each file counts."""
    folder = make_run(tmp_path, events_of(10)[:5])
    (folder / LOCK).touch()
    write_rank(folder, 0)
    write_rank(folder, 2)
    (folder / "ranks" / "rank-x.jsonl").write_text("{}\n")
    assert signs(read_status(folder)) == {0: "active", 1: "missing"}
    write_rank(folder, 0, age=SILENT_SECONDS + 1)
    write_rank(folder, 1)
    (folder / "environment.json").unlink()
    assert signs(read_status(folder)) == {0: "silent", 1: "active", 2: "active"}


@pytest.mark.parametrize("width", [60, 80, 200])
def test_table(width: int, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "[bold]a", events_of(20))
    gpu = {"use_percent": 88, "memory_bytes": 3 << 30}
    write_rank(folder, 0, gpu=gpu, samples_per_second=120.5, data_share=0.12, doing="in step 21, waiting")
    status = read_status(folder)
    assert status is not None
    console = Console(width=width)
    with console.capture() as capture:
        console.print(render(Path("[bold]a"), status))
    lines = capture.get().splitlines()
    assert lines[0].startswith("[bold]a  ended  epoch 2/3  step 20/30")
    assert max(map(len, lines)) <= width
    titles, first, second = lines[-3:]
    assert titles.split()[0] == "rank"
    assert first.split()[0] == "0"
    assert second.split()[0] == "1"
    if width == 200:
        assert "loss" in lines[0]
        assert titles.split() == ["rank", "step", "samples/s", "data", "GPU", "GPU", "memory", "age", "activity"]
        assert first.split()[:6] == ["0", "1", "120", "12%", "88%", "3"]
        assert "not yet" in second
