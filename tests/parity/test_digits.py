"""The recipe `digits` gives the same bits on any number of processes."""

from pathlib import Path
from typing import Any

import pytest

from helpers.small_recipes import DIGITS
from helpers.system import events, here, weights

SMALL = ("epochs=2", "model.options.width=8", "batch_size=128")


def train(root: Path, processes: int, *overrides: str, name: str | None = None) -> dict[str, Any]:
    """Train on `processes` processes and return the outcome."""
    run_name = name or f"on-{processes}"
    settings = list(overrides)
    assert here("train", "digits", "--exact", "--processes", processes, "--name", run_name, *settings, cwd=root) == 0
    return outcome(root / "runs" / run_name)


def outcome(run: Path) -> dict[str, Any]:
    """Return all results of a run that must not depend on the number of processes."""
    step_keys = ("step", "epoch", "step_in_epoch", "loss", "lr", "grad_norm", "skipped")
    ignored = ("time", "samples_per_second")
    return {
        "weights": weights(run),
        "best": weights(run, "best"),
        "steps": [{key: event[key] for key in step_keys} for event in events(run, "step")],
        "evaluations": [
            {key: value for key, value in event.items() if key not in ignored} for event in events(run, "evaluation")
        ],
    }


def test_1_and_4_processes_give_the_same_bits(tmp_path: Path) -> None:
    """The weights of 3 processes are compared in `test_invariants.py`."""
    one, four = (train(tmp_path, processes, *SMALL) for processes in (1, 4))
    assert [evaluation["samples"] for evaluation in one["evaluations"]] == [360, 360]
    assert {"train_loss", "train_accuracy", "loss", "accuracy"} <= one["evaluations"][0].keys()
    assert len(one["steps"]) == 2 * 12  # 1,437 samples: eleven batches of 128 and one of 29
    assert four == one


@pytest.mark.slow
def test_another_seed_gives_other_bits(tmp_path: Path) -> None:
    """Control: the comparisons above would also hold for runs without training."""
    first = train(tmp_path, 1, *DIGITS, name="first")
    second = train(tmp_path, 1, *DIGITS, "step.seed=1", name="second")
    assert first["weights"] != second["weights"]
    assert first["steps"][0]["loss"] != second["steps"][0]["loss"]


@pytest.mark.long
@pytest.mark.slow
def test_shipped_recipe_learns_on_two_processes(tmp_path: Path) -> None:
    run = train(tmp_path, 2)
    assert len(run["evaluations"]) == 15
    assert run["evaluations"][-1]["accuracy"] >= 0.98
