"""A run as its files tell: before it is there, while it goes and after it."""

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

from samestep.checkpoint.lock import FolderLock
from samestep.errors import InputError
from samestep.tools.top.picture import Picture
from samestep.tools.top.watch import RunWatch


def begin(run: Path, epochs: int = 3) -> None:
    run.mkdir(parents=True)
    (run / "recipe.yaml").write_text(f"epochs: {epochs}\n", encoding="utf-8")


def environment(run: Path, processes: int) -> None:
    entry = {"started": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "processes": processes}
    (run / "environment.json").write_text(json.dumps([entry]), encoding="utf-8")


def tell(run: Path, **event: Any) -> None:
    with (run / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"time": time.time(), **event}) + "\n")


def tell_step(run: Path, number: int, at: float) -> None:
    facts = {"epoch": (number - 1) // 10, "step_in_epoch": (number - 1) % 10 + 1, "steps_in_epoch": 10, "loss": 0.5}
    with (run / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"time": at, "event": "step", "step": number, **facts}) + "\n")


def tell_rank(run: Path, rank: int, pid: int | None = None) -> None:
    (run / "ranks").mkdir(exist_ok=True)
    facts = {"time": time.time(), "rank": rank, "host": socket.gethostname(), "pid": pid or os.getpid(), "step": 0}
    with (run / "ranks" / f"rank-{rank}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(facts) + "\n")


def process_that_ended() -> int:
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def seen(watch: RunWatch) -> Picture:
    picture = watch.look()
    assert picture is not None
    return picture


def test_a_run_from_before_it_begins_to_its_end(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    watch = RunWatch(run)
    assert watch.look() is None
    begin(run)
    found = seen(watch)
    assert (found.state, found.epoch, found.epochs, found.steps, found.ranks) == ("starting", 0, 3, None, [])
    with FolderLock(run):
        tell_rank(run, 0)
        environment(run, 2)
        found = seen(watch)
        assert found.state == "running"
        assert [row.sign for row in found.ranks] == ["heard", "not heard"]
        tell_rank(run, 0, pid=process_that_ended())
        assert [row.sign for row in seen(watch).ranks] == ["gone", "not heard"]
        began = time.time() - 24
        for number in range(1, 13):
            tell_step(run, number, at=began + 2 * number)
        tell(run, event="evaluation", step=10, epoch=1, epochs=3, loss=0.25, accuracy=0.5, is_best=True, train_loss=1.0)
        found = seen(watch)
        assert (found.epoch, found.step, found.steps, found.progress) == (2, 12, 30, 0.4)
        assert found.seconds_left == pytest.approx(36, rel=0.1)
        assert (found.loss, found.evaluation) == (0.5, {"epoch": 1, "loss": 0.25, "accuracy": 0.5})
    assert seen(watch).state == "dead"
    assert seen(watch).seconds_left is None
    tell(run, event="end", stopped=True, step=12)
    assert seen(watch).state == "stopped"
    tell(run, event="resume", step=12)
    tell(run, event="end", stopped=False, step=30)
    assert seen(watch).state == "ended"
    with FolderLock(run):
        assert seen(watch).state == "running"


def test_where_there_are_no_locks_ranks_tell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "a"
    begin(run)
    monkeypatch.setattr("samestep.tools.top.watch.is_locked", lambda folder: None)
    watch = RunWatch(run)
    assert seen(watch).state == "starting"
    tell_rank(run, 0)
    assert seen(watch).state == "running"
    tell(run, event="end", stopped=False, step=0)
    assert seen(watch).state == "ended"


def test_a_run_that_is_removed_and_made_again_is_another_one(tmp_path: Path) -> None:
    run = tmp_path / "a"
    watch = RunWatch(run)
    begin(run, epochs=3)
    tell_step(run, 5, at=1.0)
    assert seen(watch).step == 5
    shutil.rmtree(run)
    assert watch.look() is None
    begin(run, epochs=7)
    found = seen(watch)
    assert (found.step, found.epochs, found.state) == (0, 7, "starting")


@pytest.mark.parametrize("recipe", [None, "", "epochs: many", "[1, 2", "lr: 1"])
def test_a_folder_that_is_no_run_is_refused(
    tmp_path: Path, recipe: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("samestep.tools.top.watch._PATIENCE_SECONDS", 0.1)
    if recipe is not None:
        (tmp_path / "recipe.yaml").write_text(recipe, encoding="utf-8")
    with pytest.raises(InputError, match="is not a run"):
        RunWatch(tmp_path).look()


def test_a_file_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(InputError, match="is not a run"):
        RunWatch(tmp_path / "a").look()


def test_a_recipe_that_is_being_written_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("epo", encoding="utf-8")
    writes = threading.Timer(0.3, (tmp_path / "recipe.yaml").write_text, ["epochs: 4"])
    writes.start()
    assert seen(RunWatch(tmp_path)).epochs == 4
    writes.join()


def test_looking_changes_nothing(tmp_path: Path) -> None:
    begin(tmp_path / "a")
    before = sorted(tmp_path.rglob("*"))
    seen(RunWatch(tmp_path / "a"))
    assert sorted(tmp_path.rglob("*")) == before
