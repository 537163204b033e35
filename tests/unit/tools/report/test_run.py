"""A run as its folder tells it."""

from pathlib import Path
from typing import Any

import pytest

from run_folders import START, events_of, make_run, step_event
from samestep.errors import InputError
from samestep.tools.report.run import Run, read_run, read_runs


def evaluation(step: int, **values: Any) -> dict[str, Any]:
    return {"time": START + step, "event": "evaluation", "step": step, "samples": 10, "is_best": False, **values}


def run_of(folder: Path, events: list[dict[str, Any]]) -> Run:
    return read_run(make_run(folder, events), "a")


def test_best_evaluation_is_the_last_that_was_the_best(tmp_path: Path) -> None:
    found = [evaluation(5, is_best=True), evaluation(10, is_best=True), evaluation(15)]
    run = run_of(tmp_path / "a", found)
    assert run.best is not None
    assert run.last is not None
    assert (run.best["step"], run.last["step"]) == (10, 15)
    none = run_of(tmp_path / "b", found[2:])
    assert none.best is none.last is not None
    assert run_of(tmp_path / "c", []).best is None


@pytest.mark.parametrize(
    ("values", "deciding"),
    [
        ({"train_loss": 1.0, "loss": 1.0, "accuracy": 0.5, "dice": 0.5}, "accuracy"),
        ({"loss": 1.0, "loss_dice": 1.0, "iou": "nan"}, "iou"),
        ({"loss": 1.0, "loss_dice": 1.0}, "loss"),
        ({}, None),
    ],
)
def test_first_metric_decides(values: dict[str, Any], deciding: str | None, tmp_path: Path) -> None:
    assert run_of(tmp_path / "a", [evaluation(5, **values)]).deciding == deciding


def test_how_it_ended(tmp_path: Path) -> None:
    step, end = step_event(1, START), {"time": START + 1, "event": "end", "stopped": False, "step": 1}
    states = [
        run_of(tmp_path / str(n), e).state for n, e in enumerate(([step], [step, end], [{**end, "stopped": True}]))
    ]
    assert states == ["not ended", "finished", "stopped"]


def test_checkpoints_have_sizes_and_names(tmp_path: Path) -> None:
    (saved,) = run_of(tmp_path / "a", events_of(10)).checkpoints
    assert (saved.step, saved.size, saved.names) == (12, 4000, ("best", "last"))
    assert saved.sizes == {"model.safetensors": 3000, "optimizer.safetensors": 1000}


def test_runs_of_one_name_are_called_by_their_paths(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / place / "first", []) for place in ("a", "b")]
    assert [run.name for run in read_runs(folders)] == [str(folder) for folder in folders]
    assert [run.name for run in read_runs(folders[:1])] == ["first"]
    with pytest.raises(InputError, match="given twice"):
        read_runs([folders[0], folders[1], folders[0]])
