"""State of a run before, during and after training, and its last events."""

import json
import os
import shutil
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from samestep.checkpoint.lock import FolderLock
from samestep.errors import InputError
from samestep.tools.top.display import render
from samestep.tools.top.run_status import LastEvents, RunReader, RunStatus


def create_run(run: Path, epochs: int = 3) -> None:
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text(f"epochs: {epochs}\n", encoding="utf-8")


def write_environment(run: Path, processes: int) -> None:
    entry = {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "processes": processes}
    (run / "environment.json").write_text(json.dumps([entry]), encoding="utf-8")


def log(run: Path, **event: Any) -> None:
    with (run / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"time": time.time(), **event}) + "\n")


def log_step(run: Path, number: int, at: float) -> None:
    line = {"epoch": (number - 1) // 10, "step_in_epoch": (number - 1) % 10 + 1, "steps_in_epoch": 10, "loss": 0.5}
    with (run / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"time": at, "event": "step", "step": number, **line}) + "\n")


def write_rank(run: Path, rank: int, pid: int | None = None) -> None:
    (run / "ranks").mkdir(exist_ok=True)
    line = {"time": time.time(), "rank": rank, "host": socket.gethostname(), "pid": pid or os.getpid(), "step": 0}
    with (run / "ranks" / f"rank-{rank}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def ended_process() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def read(reader: RunReader) -> RunStatus:
    status = reader.read()
    assert status is not None
    return status


def test_run_from_before_its_start_to_its_end(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    reader = RunReader(run)
    assert reader.read() is None
    create_run(run)
    status = read(reader)
    assert (status.state, status.epoch, status.epochs, status.steps, status.ranks) == ("starting", 0, 3, None, [])
    with FolderLock(run):
        write_rank(run, 0)
        write_environment(run, 2)
        status = read(reader)
        assert status.state == "running"
        assert [row.sign for row in status.ranks] == ["active", "missing"]
        write_rank(run, 0, pid=ended_process())
        assert [row.sign for row in read(reader).ranks] == ["gone", "missing"]
        start = time.time() - 24
        for number in range(1, 13):
            log_step(run, number, at=start + 2 * number)
        log(run, event="evaluation", step=10, epoch=1, epochs=3, loss=0.25, accuracy=0.5, is_best=True, train_loss=1.0)
        status = read(reader)
        assert (status.epoch, status.step, status.steps, status.progress) == (2, 12, 30, 0.4)
        assert status.seconds_left == pytest.approx(36, rel=0.1)
        assert (status.loss, status.evaluation) == (0.5, {"epoch": 1, "loss": 0.25, "accuracy": 0.5})
    assert read(reader).state == "dead"
    assert read(reader).seconds_left is None
    log(run, event="end", stopped=True, step=12)
    assert read(reader).state == "stopped"
    log(run, event="resume", step=12)
    log(run, event="end", stopped=False, step=30)
    assert read(reader).state == "ended"
    with FolderLock(run):
        assert read(reader).state == "running"


def test_run_of_a_custom_loop_has_optional_epochs_and_can_fail(tmp_path: Path) -> None:
    run = tmp_path / "a"
    run.mkdir()
    (run / "run.json").write_text("{}", encoding="utf-8")
    reader = RunReader(run)
    with FolderLock(run):
        log(run, event="step", step=7, loss=0.5)
        status = read(reader)
        assert (status.state, status.epoch, status.epochs, status.steps, status.step) == ("running", 0, None, None, 7)
        log(run, event="step", step=8, epoch=0, step_in_epoch=8, steps_in_epoch=10, epochs=2, loss=0.5)
        status = read(reader)
        assert (status.epoch, status.epochs, status.steps, status.progress) == (1, 2, 20, 0.4)
        log(run, event="failure", code="E_NONFINITE", exit_code=1, text="the loss is nan")
        assert read(reader).state == "running"
    status = read(reader)
    assert (status.state, (status.failure or {})["code"], status.unreadable_lines) == ("failed", "E_NONFINITE", 0)
    text = "".join(segment.text for segment in Console(width=100).render(render(status, 100)))
    assert "failed the loss is nan [E_NONFINITE]" in " ".join(text.split())
    log(run, event="step", step=9, epoch="?", loss=0.5)
    assert read(reader).unreadable_lines == 1


def test_ranks_decide_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "a"
    create_run(run)
    monkeypatch.setattr("samestep.tools.top.run_status.is_locked", lambda folder: None)
    reader = RunReader(run)
    assert read(reader).state == "starting"
    write_rank(run, 0)
    assert read(reader).state == "running"
    log(run, event="end", stopped=False, step=0)
    assert read(reader).state == "ended"


def test_run_that_is_removed_and_created_again_is_another_run(tmp_path: Path) -> None:
    run = tmp_path / "a"
    reader = RunReader(run)
    create_run(run, epochs=3)
    log_step(run, 5, at=1.0)
    assert read(reader).step == 5
    shutil.rmtree(run)
    assert reader.read() is None
    create_run(run, epochs=7)
    status = read(reader)
    assert (status.step, status.epochs, status.state) == (0, 7, "starting")


@pytest.mark.parametrize("recipe", [None, "", "epochs: many", "[1, 2", "lr: 1"])
def test_folder_that_is_not_a_run(tmp_path: Path, recipe: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samestep.tools.top.run_status._RECIPE_SECONDS", 0.1)
    if recipe is not None:
        (tmp_path / "recipe.yaml").write_text(recipe, encoding="utf-8")
    with pytest.raises(InputError, match="is not a run") as caught:
        RunReader(tmp_path).read()
    assert caught.value.code == "E_NOT_A_RUN"


def test_file_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(InputError, match="is not a run") as caught:
        RunReader(tmp_path / "a").read()
    assert caught.value.code == "E_NOT_A_RUN"


def test_waits_for_a_recipe_that_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samestep.tools.top.run_status._RECIPE_SECONDS", 20)
    (tmp_path / "recipe.yaml").write_text("epo", encoding="utf-8")
    writer = threading.Timer(0.3, (tmp_path / "recipe.yaml").write_text, ["epochs: 4"])
    writer.start()
    assert read(RunReader(tmp_path)).epochs == 4
    writer.join()


def test_reading_changes_nothing(tmp_path: Path) -> None:
    create_run(tmp_path / "a")
    before = sorted(tmp_path.rglob("*"))
    read(RunReader(tmp_path / "a"))
    assert sorted(tmp_path.rglob("*")) == before


EVALUATION = {
    "event": "evaluation",
    "step": 4,
    "epoch": 1,
    "epochs": 3,
    "train_loss": 2.0,
    "is_best": True,
    "loss": 1.5,
}


def line(event: dict[str, Any], time: float = 1000.0) -> bytes:
    return json.dumps({"time": time, **event}).encode()


def step_line(number: int, time: float) -> bytes:
    position = {"epoch": (number - 1) // 200, "step_in_epoch": (number - 1) % 200 + 1, "steps_in_epoch": 200}
    return line({"event": "step", "step": number, **position, "loss": 1 / number}, time)


def last_events(*lines: bytes) -> LastEvents:
    events = LastEvents()
    events.update(lines)
    return events


def test_no_events() -> None:
    events = last_events()
    assert (events.step, events.evaluation, events.end, events.seconds_per_step()) == ({}, {}, None, None)


@pytest.mark.parametrize("count", [1, 2, 7, 64, 1000])
def test_last_step_and_speed_do_not_depend_on_the_number_of_lines_per_update(count: int) -> None:
    events = LastEvents()
    lines = [step_line(number, 1000 + number / 4) for number in range(1, 300)]
    for begin in range(0, len(lines), count):
        events.update(lines[begin : begin + count])
    assert events.step["step"] == 299
    assert events.seconds_per_step() == pytest.approx(0.25, rel=0.05)


def test_speed_is_that_of_the_last_minutes() -> None:
    fast = [step_line(number, 1000 + number / 100) for number in range(1, 65)]
    slow = [step_line(number, 2000 + 5.0 * number) for number in range(65, 300)]
    events = LastEvents()
    for data in fast + slow:
        events.update([data])
    assert events.seconds_per_step() == pytest.approx(5.0, rel=0.05)


def test_time_since_the_last_step_counts() -> None:
    events = last_events(step_line(1, 1000.0), step_line(2, 1001.0), step_line(64, 1002.0), step_line(65, 1003.0))
    assert events.seconds_per_step(until=1002.5) == events.seconds_per_step() == pytest.approx(3 / 64)
    assert events.seconds_per_step(until=1064.0) == 1.0


def test_resume_clears_end_and_speed() -> None:
    steps = [step_line(number, 1000.0 + number) for number in range(1, 4)]
    assert last_events(*steps, line({"event": "end", "stopped": False})).end == "ended"
    events = last_events(*steps, line({"event": "end", "stopped": True}))
    assert events.end == "stopped"
    events.update([line({"event": "resume", "step": 3})])
    assert (events.end, events.seconds_per_step()) == (None, None)
    events.update([step_line(4, 2000.0), step_line(5, 2001.0)])
    assert events.seconds_per_step() == pytest.approx(1.0)


def test_repeated_steps_restart_the_measurement_of_speed() -> None:
    events = LastEvents()
    for data in [step_line(3, 1003.0), step_line(4, 1004.0), step_line(1, 1100.0), step_line(2, 1103.0)]:
        events.update([data])
    assert (events.step["step"], events.seconds_per_step()) == (2, 3.0)


def test_values_of_the_evaluation() -> None:
    events = last_events(step_line(4, 1000.0), line({**EVALUATION, "accuracy": 0.5, "samples_per_second": 9.0}))
    assert events.evaluation == {"epoch": 1, "loss": 1.5, "accuracy": 0.5}


def test_cut_line_is_skipped() -> None:
    cut = step_line(2, 1001.0)[:30]
    events = last_events(step_line(1, 1000.0), cut + step_line(2, 1001.0), step_line(3, 1002.0), cut)
    assert (events.step["step"], events.unreadable) == (3, 1)
