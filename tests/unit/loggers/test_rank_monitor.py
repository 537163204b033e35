"""Resource samples of a rank in `ranks/rank-N.jsonl`."""

import json
import os
import re
import socket
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from helpers.system import until
from samestep.distributed.world import World
from samestep.loggers.rank_monitor import RankMonitor, RankProgress

ROOT = Path(__file__).parents[3]


def read_samples(run: Path) -> list[dict[str, Any]]:
    text = (run / "ranks" / "rank-0.jsonl").read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def integrate(samples: list[dict[str, Any]]) -> Callable[[str], float]:
    """Return a function that integrates a rate over time; a rate refers to the time since the previous sample."""
    return lambda key: sum((after["time"] - before["time"]) * after[key] for before, after in pairwise(samples))


def documented_keys(title: str) -> list[str]:
    """Return the keys in the table of a section of docs/guides/runs.md, in order."""
    page = (ROOT / "docs" / "reference" / "events.md").read_text(encoding="utf-8")
    table = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return [name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]


def test_samples_at_the_start_periodically_and_at_the_end(alone: World, tmp_path: Path) -> None:
    began, path = time.time(), tmp_path / "ranks" / "rank-0.jsonl"
    with RankMonitor(tmp_path, alone, interval=0.25):
        until(lambda: path.is_file() and path.read_bytes().count(b"\n") >= 4, "a fourth line", 60)
        ended = time.time()
    times = [sample["time"] for sample in read_samples(tmp_path)]
    gaps = [after - before for before, after in pairwise(times)]
    assert all(gap > 0.24 for gap in gaps[:-1])
    assert began - 0.001 <= times[0]
    assert ended - 0.001 <= times[-1] <= time.time() + 0.001


def test_sample_has_the_documented_keys(alone: World, tmp_path: Path) -> None:
    with RankMonitor(tmp_path, alone, first_step=7):
        pass
    for sample in read_samples(tmp_path):
        assert list(sample) == documented_keys("Ranks")
        assert (sample["rank"], sample["host"], sample["pid"]) == (0, socket.gethostname(), os.getpid())
        assert (sample["step"], sample["gpu"]) == (7, None)
        assert sample["memory_bytes"] > 1e7


def test_rates_refer_to_the_time_since_the_previous_sample(alone: World, tmp_path: Path) -> None:
    began = time.monotonic()

    def progress() -> RankProgress:
        seconds = time.monotonic() - began
        return RankProgress(100 + int(40 * seconds), int(800 * seconds), seconds / 4)

    def until_samples(count: int) -> None:
        until(lambda: path.is_file() and path.read_bytes().count(b"\n") >= count, f"{count} samples", 60)

    path = tmp_path / "ranks" / "rank-0.jsonl"
    with RankMonitor(tmp_path, alone, first_step=100, interval=0.5) as monitor:
        until_samples(1)
        monitor.follow(progress)  # earlier work does not count as speed
        followed = time.time()
        with alone.session.status.operation("step 101"):
            until_samples(2)
            wait_began = time.time()
            with alone.session.status.waiting("an all-reduce"):
                until_samples(4)
    first, *later, last = read_samples(tmp_path)
    assert (first["steps_per_second"], first["samples_per_second"]) == (0, 0)
    total = integrate([{"time": followed}, *later])
    seconds = later[-1]["time"] - followed
    assert total("steps_per_second") == pytest.approx(40 * seconds, rel=0.3)
    assert total("samples_per_second") == pytest.approx(800 * seconds, rel=0.3)
    assert total("data_share") == pytest.approx(0.25 * seconds, rel=0.3)
    assert total("wait_share") == pytest.approx(later[-1]["time"] - wait_began, abs=0.3)
    assert later[0]["wait_share"] < 0.5 < later[-1]["wait_share"]
    assert (later[-1]["doing"], later[-1]["waits"]) == ("in step 101, waiting in an all-reduce", True)
    assert (last["doing"], last["waits"]) == ("after step 101", False)


def test_appends_after_existing_lines_and_after_a_torn_line(alone: World, tmp_path: Path) -> None:
    with RankMonitor(tmp_path, alone):
        pass
    path = tmp_path / "ranks" / "rank-0.jsonl"
    before = path.read_bytes()
    path.write_bytes(before + b'{"time": 17')
    with RankMonitor(tmp_path, alone):
        pass
    after = path.read_bytes()
    assert after.startswith(before + b'{"time": 17\n{"time": ')
    assert len(after.splitlines()) == 5


def test_unwritable_file_is_logged_once(alone: World, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "ranks" / "rank-0.jsonl"
    path.parent.mkdir()
    path.symlink_to("/dev/full")
    with RankMonitor(tmp_path, alone, interval=0.05):
        time.sleep(0.3)
    assert caplog.messages == [f"rank 0 cannot write {path}: it is no regular file; training continues"]


def test_last_sample_of_a_failed_rank_names_the_operation(alone: World, tmp_path: Path) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        RankMonitor(tmp_path, alone),
        alone.session.status.operation("step 3"),
    ):
        1 / 0  # noqa: B018
    assert read_samples(tmp_path)[-1]["doing"] == "in step 3"
