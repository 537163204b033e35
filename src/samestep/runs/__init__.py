"""Run directories: names of runs, entries of starts, results, the directory of a custom loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from samestep.distributed.env import expand_path
from samestep.errors import InputError

RUNS = Path("runs")  # default folder of runs
LOOP = "run.json"  # marks the run directory of a custom loop


@dataclass(frozen=True)
class RunResult:
    """Result of `samestep.train`.

    Attributes:
        folder: directory of the run.
        metrics: `loss`, `samples` and metrics of the last evaluation; empty without one.
        training: `loss`, and accuracies by name, of the steps of the last complete epoch.
        best: best value of `best_by`, or None.
        best_by: name of the metric that selects the best checkpoint.
        best_epoch: epochs before the evaluation with the best value.
        step: number of optimizer steps.
        skipped_steps: steps without an update, because loss or gradient was not finite.
        stopped: a stop request has ended the run early.
        seconds: time from the first step of this start to its end.
        samples_per_second: mean speed of the steps of this start.
    """

    folder: Path
    metrics: dict[str, float]
    training: dict[str, float]
    best: float | None
    best_by: str
    best_epoch: int
    step: int
    skipped_steps: int
    stopped: bool
    seconds: float
    samples_per_second: float

    @classmethod
    def of(cls, folder: Path, summary: Mapping[str, Any]) -> RunResult:
        """Return the result of a summary, in which training values have the prefix `train_`."""
        values = dict(summary)
        metrics = values.pop("evaluation")
        names = [name for name in values if name.startswith("train_")]
        training = {name.removeprefix("train_"): values.pop(name) for name in names}
        if training["loss"] is None:
            training = {}
        return cls(folder, metrics, training, **values)


def require_run_name(name: str, fix: str) -> None:
    """Require that a name is that of a folder, without separators.

    Raises:
        InputError: the name is empty, a path, or has unprintable characters.
    """
    if name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable():
        raise InputError(
            f"the name of the run is {name!r}",
            expected="the name of a folder in runs, without separators",
            fix=fix,
            code="E_RUN_NAME",
        )


def not_a_run(folder: Path) -> InputError:
    """Return the error of a directory that is not that of a run."""
    expected = f"a run directory, which contains recipe.yaml or {LOOP}"
    runs = [path for path in _runs_in(folder.parent) + _runs_in(RUNS) if path != folder]
    fix = "samestep train digits --name first"
    if runs:
        near = get_close_matches(folder.name, [path.name for path in runs], n=1)
        newest = max(runs, key=lambda path: path.stat().st_mtime)
        fix = f"did you mean {next((path for path in runs if path.name in near), newest)}?"
    return InputError(f"{folder} is not a run", expected, fix, code="E_NOT_A_RUN")


def run_folder(name: str) -> Path:
    """Return the directory of a run by its path, or by its name in the folder of runs."""
    path = Path(expand_path(name))
    if not path.exists() and (RUNS / path).is_dir():
        return RUNS / path
    return path


def _runs_in(folder: Path) -> list[Path]:
    try:
        return [
            path
            for path in sorted(folder.iterdir())
            if (path / "recipe.yaml").is_file() or (path / LOOP).is_file()
        ]
    except OSError:  # no folder, or one that cannot be read
        return []
