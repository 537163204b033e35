"""The run directory of a custom loop, which is killed on 2 processes and continued on 3."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.run_folders import events_of, make_run
from helpers.system import here

SCRIPT = Path(__file__).parents[1] / "helpers" / "loop_in_run.py"
PER_EPOCH = 10
WITHOUT_TELEMETRY = {"DO_NOT_TRACK": "true", "MLFLOW_DISABLE_TELEMETRY": "true", "WANDB_ERROR_REPORTING": "false"}


def train(folder: Path, processes: int, epochs: int, kill_at: int, *loggers: str) -> int:
    command = [sys.executable, SCRIPT, *map(str, (processes, epochs, kill_at)), *loggers]
    environment = {**os.environ, **WITHOUT_TELEMETRY}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, timeout=200, check=False)
    return done.returncode


def events(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "runs" / "first" / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def status(folder: Path, capfd: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capfd.readouterr()
    assert here("top", "runs/first", "--json", cwd=folder) == 0
    result: dict[str, Any] = json.loads(capfd.readouterr().out)
    return result


@pytest.mark.long
def test_killed_loop_continues_its_run_on_more_processes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    kill_at = PER_EPOCH + 5
    assert train(tmp_path, 2, 2, kill_at, "tensorboard") != 0
    run = tmp_path / "runs" / "first"
    killed = status(tmp_path, capfd)
    assert killed["state"] == "dead"
    assert [row["rank"] for row in killed["ranks"]] == [0, 1]
    before = len(events(tmp_path))

    assert train(tmp_path, 3, 3, 0, "tensorboard") == 0
    added = events(tmp_path)[before:]
    assert (added[0]["event"], added[0]["step"], added[0]["epoch"]) == ("resume", PER_EPOCH, 1)
    whole = tmp_path / "whole"
    whole.mkdir()
    assert train(whole, 1, 3, 0) == 0
    expected = [(event["step"], event["checksum"]) for event in events(whole) if event["event"] == "checksum"]
    assert [step for step, _ in expected] == [PER_EPOCH, 2 * PER_EPOCH, 3 * PER_EPOCH]
    assert [(e["step"], e["checksum"]) for e in events(tmp_path) if e["event"] == "checksum"] == expected
    starts = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    assert [start["started_as"] for start in starts] == ["function", "function"]
    assert here("diff", "runs/first", whole / "runs" / "first", cwd=tmp_path) == 0
    steps = [event["step"] for event in added if event["event"] == "step"]
    assert steps == sorted(set(steps))
    assert (steps[0], steps[-1]) == (PER_EPOCH + 1, 3 * PER_EPOCH)
    assert added[-1] | {"time": 0, "seconds": 0} == {
        "time": 0,
        "event": "end",
        "stopped": False,
        "step": 3 * PER_EPOCH,
        "seconds": 0,
    }
    assert sorted(path.name for path in (run / "ranks").iterdir()) == [f"rank-{rank}.jsonl" for rank in range(3)]
    entries = json.loads((run / "environment.json").read_text(encoding="utf-8"))
    assert [entry["processes"] for entry in entries] == [2, 3]

    ended = status(tmp_path, capfd)
    assert (ended["state"], ended["epoch"], ended["epochs"], ended["steps"]) == ("ended", 3, 3, 30)
    assert [(row["rank"], row["line"]["step"]) for row in ended["ranks"]] == [(rank, 30) for rank in range(3)]

    other = make_run(tmp_path / "runs" / "recipe", events_of(20), batch_size=32)
    assert here("report", run, other, "--out", "both.html", "--json", cwd=tmp_path) == 0
    report = json.loads(capfd.readouterr().out)
    summary = report["runs"][0]
    assert (summary["state"], summary["steps"], summary["resumed"]) == ("finished", 30, 1)
    last = next(event for event in reversed(added) if event["event"] == "evaluation" and "accuracy" in event)
    assert summary["last"]["accuracy"] == summary["last"]["accuracy_2"] == last["accuracy"]  # on the same data
    page = (tmp_path / "both.html").read_text(encoding="utf-8")
    assert "Logged: tenth" in page

    from samestep.tools.report.run import read_run

    log = read_run(run, "first").events
    assert log.curves["tenth"].points()[0].tolist() == list(range(1, 31))
    assert [step for step, event in log.evaluations.items() if "accuracy" in event] == [10, 20, 30]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_trackers_keep_their_run(tmp_path: Path) -> None:
    """The packages are imported in ranks only; both need seconds."""
    for package in ("wandb", "mlflow", "sqlalchemy"):
        pytest.importorskip(package)
    run = tmp_path / "runs" / "first"
    assert train(tmp_path, 2, 2, PER_EPOCH + 5, "wandb", "mlflow") != 0
    ids = [(run / name / "run-id.txt").read_text(encoding="utf-8") for name in ("wandb", "mlflow")]
    assert train(tmp_path, 3, 3, 0, "wandb", "mlflow") == 0
    assert ids == [(run / name / "run-id.txt").read_text(encoding="utf-8") for name in ("wandb", "mlflow")]
    files = [path.name for path in (run / "wandb").glob("offline-run-*/run-*.wandb")]
    assert files == [f"run-{ids[0]}.wandb"] * 2
    code = f"""
import json, mlflow
client = mlflow.MlflowClient("sqlite:///{run}/mlflow.db")
(run,) = client.search_runs([client.get_experiment_by_name("samestep").experiment_id])
steps = sorted({{point.step for point in client.get_metric_history(run.info.run_id, "tenth")}})
print(json.dumps([run.info.run_id, run.info.status, run.data.params["batch_size"], steps]))
"""
    environment = {**os.environ, **WITHOUT_TELEMETRY}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=100, check=True)
    assert json.loads(done.stdout.splitlines()[-1]) == [ids[1], "FINISHED", "12", list(range(1, 31))]
