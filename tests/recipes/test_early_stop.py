"""Early stopping of a recipe, and the summary of a run."""

from pathlib import Path

import pytest

from helpers.system import answer, events, here
from samestep.errors import EXIT_DONE

SMALL = ("batch_size=256", "model.options.width=8", "epochs=6", "stop.patience=2", "best_mode=min")


def epochs(run: Path) -> list[int]:
    return [event["epoch"] for event in events(run, "evaluation")]


def test_training_ends_without_a_better_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lowest accuracy is the best here, so that it is that of the first epoch."""
    assert here("train", "digits", "--name", "a", "--processes", 2, *SMALL, cwd=tmp_path) == EXIT_DONE
    run = tmp_path / "runs" / "a"
    out = capsys.readouterr().out
    assert epochs(run) == [1, 2, 3]
    assert events(run, "note")[-1]["text"] == "early stop after epoch 3: no better accuracy for 2 epochs"
    assert "(epoch 1)" in next(line for line in out.splitlines() if line.startswith("best "))
    # A second start has nothing to do, also on another number of processes.
    assert here("resume", "a", "--processes", 1, "--json", cwd=tmp_path) == EXIT_DONE
    summary = answer(capsys)
    assert (summary["best_by"], summary["best_epoch"]) == ("accuracy", 1)
    assert epochs(run) == [1, 2, 3]
    # Without the early stop, the remaining epochs follow, from the saved recipe also later.
    assert here("resume", "a", "stop=null", "epochs=4", cwd=tmp_path) == EXIT_DONE
    assert epochs(run) == [1, 2, 3, 4]
    assert here("resume", "a", "epochs=5", cwd=tmp_path) == EXIT_DONE
    assert epochs(run) == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_stopped_and_resumed_run_ends_at_the_same_epoch(tmp_path: Path) -> None:
    settings = ("stop.patience=3", "batch_size=256", "model.options.width=8", "best_mode=min")
    assert here("train", "digits", "epochs=2", "--name", "a", *settings, cwd=tmp_path) == EXIT_DONE
    assert here("resume", "a", "epochs=9", cwd=tmp_path) == EXIT_DONE
    assert epochs(tmp_path / "runs" / "a") == [1, 2, 3, 4]
