"""What a rank tells of itself while a run goes."""

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

from samestep import World
from samestep.record.vitals import Done, Vitals
from system import until

ROOT = Path(__file__).parents[3]
NOTHING = Done(0, 0, 0.0)


def lines(run: Path) -> list[dict[str, Any]]:
    text = (run / "ranks" / "rank-0.jsonl").read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def total(found: list[dict[str, Any]]) -> Callable[[str], float]:
    """What lines say in all: each tells of the time since the one before."""
    return lambda key: sum((after["time"] - before["time"]) * after[key] for before, after in pairwise(found))


def documented(title: str) -> list[str]:
    """Keys of the table below a title of the page on runs, in their order."""
    page = (ROOT / "docs" / "runs.md").read_text(encoding="utf-8")
    table = page.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    return [name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)]


def test_a_line_at_once_then_again_and_again_and_one_at_the_end(alone: World, tmp_path: Path) -> None:
    began, path = time.time(), tmp_path / "ranks" / "rank-0.jsonl"
    with Vitals(tmp_path, alone, every=0.25):
        until(lambda: path.is_file() and path.read_bytes().count(b"\n") >= 4, "a fourth line", 60)
        ends = time.time()
    times = [line["time"] for line in lines(tmp_path)]
    gaps = [after - before for before, after in pairwise(times)]
    assert all(gap > 0.24 for gap in gaps[:-1])
    assert began - 0.001 <= times[0]
    assert ends - 0.001 <= times[-1] <= time.time() + 0.001


def test_a_line_has_the_documented_keys(alone: World, tmp_path: Path) -> None:
    with Vitals(tmp_path, alone, first_step=7):
        pass
    for line in lines(tmp_path):
        assert list(line) == documented("Ranks")
        assert (line["rank"], line["host"], line["pid"]) == (0, socket.gethostname(), os.getpid())
        assert (line["step"], line["gpu"]) == (7, None)
        assert line["memory_bytes"] > 1e7


def test_rates_are_those_since_the_line_before(alone: World, tmp_path: Path) -> None:
    began = time.monotonic()

    def done() -> Done:
        seconds = time.monotonic() - began
        return Done(100 + int(40 * seconds), int(800 * seconds), seconds / 4)

    with Vitals(tmp_path, alone, first_step=100, every=0.5) as vitals:
        vitals.follow(done)  # from here on: what was done before is no speed
        followed = time.time()
        with alone.pulse.during("engine.step 101"):
            time.sleep(0.8)
            waits = time.time()
            with alone.pulse.waiting("an all-reduce"):
                time.sleep(0.8)
    first, *later, last = lines(tmp_path)
    assert (first["steps_per_second"], first["samples_per_second"]) == (0, 0)
    told = total([{"time": followed}, *later])
    seconds = later[-1]["time"] - followed
    assert told("steps_per_second") == pytest.approx(40 * seconds, rel=0.3)
    assert told("samples_per_second") == pytest.approx(800 * seconds, rel=0.3)
    assert told("data_share") == pytest.approx(0.25 * seconds, rel=0.3)
    assert told("wait_share") == pytest.approx(later[-1]["time"] - waits, abs=0.3)
    assert later[0]["wait_share"] < 0.5 < later[-1]["wait_share"]
    assert (later[-1]["doing"], later[-1]["waits"]) == ("in engine.step 101, waiting in an all-reduce", True)
    assert (last["doing"], last["waits"]) == ("after engine.step 101", False)


@pytest.mark.parametrize("seconds", [0.0, 0.8])
def test_cpu_is_that_of_this_process(alone: World, tmp_path: Path, seconds: float) -> None:
    began = time.process_time()
    with Vitals(tmp_path, alone, every=0.25):
        time.sleep(0.8)
        while time.process_time() < began + seconds:
            pass
    used, told = time.process_time() - began, total(lines(tmp_path))
    assert told("cpu_percent") / 100 == pytest.approx(used, abs=0.25)


def test_it_goes_on_behind_what_is_there_and_behind_half_a_line(alone: World, tmp_path: Path) -> None:
    with Vitals(tmp_path, alone):
        pass
    path = tmp_path / "ranks" / "rank-0.jsonl"
    before = path.read_bytes()
    path.write_bytes(before + b'{"time": 17')
    with Vitals(tmp_path, alone):
        pass
    after = path.read_bytes()
    assert after.startswith(before + b'{"time": 17\n{"time": ')
    assert len(after.splitlines()) == 5


def test_a_full_disk_is_told_once_and_the_run_goes_on(
    alone: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks" / "rank-0.jsonl").symlink_to("/dev/full")
    with Vitals(tmp_path, alone, every=0.05):
        time.sleep(0.3)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"rank 0 cannot tell of itself in {tmp_path}/ranks/rank-0.jsonl: No space left on device")


def test_a_machine_that_does_not_see_the_run_makes_none(
    alone: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Vitals(tmp_path / "elsewhere", alone):
        pass
    assert "No such file or directory" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_what_the_rank_does_may_fail(alone: World, tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Vitals(tmp_path, alone), alone.pulse.during("engine.step 3"):
        1 / 0  # noqa: B018
    assert lines(tmp_path)[-1]["doing"] == "in engine.step 3"
