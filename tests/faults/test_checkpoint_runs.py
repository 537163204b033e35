"""Runs with disturbed saving: a killed run, a lost disk, and a stop request during an evaluation."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.recorded import count_calls
from helpers.system import Done, Running, events, here, last_saved, state_of, steps_saved, weights
from samestep.checkpoint.durable_files import write_atomically

RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"
BLOCKING = ("loss.name=helpers.recorded:blocking_in_evaluation",)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run."""
    folder = tmp_path_factory.mktemp("undisturbed")
    assert here("train", RECIPE, "--name", "a", *BLOCKING, cwd=folder) == 0
    return folder / "runs" / "a"


def final_events(run: Path) -> dict[str, object]:
    """Return the final events of a run, without times and speed."""
    keys = {
        "step": ("loss", "lr", "grad_norm"),
        "evaluation": ("epoch", "train_loss", "loss", "samples", "is_best"),
    }
    return {kind: {e["step"]: [e[key] for key in keys[kind]] for e in events(run, kind)} for kind in keys}


def hold(folder: Path, call: int) -> Callable[[], None]:
    """Block rank 0 in a call of the loss until the returned function is called."""
    write_atomically(folder / "hold", f"0 {call}")  # the rank may read it now
    return (folder / "hold").unlink


def is_saved(run: Path, step: int) -> bool:
    return last_saved(run) == step and not list((run / "checkpoints").glob(".*-*"))


@pytest.mark.long
def test_killed_run_does_not_keep_the_lock(tmp_path: Path, undisturbed: Path) -> None:
    run = tmp_path / "runs" / "a"
    release = hold(tmp_path, 7)
    arguments = ("train", RECIPE, "--name", "a", *BLOCKING, "--processes", 2, "--checkpoint-every", 5)
    with Running(*arguments, cwd=tmp_path) as running:
        running.until(lambda: count_calls(tmp_path) == 7 and is_saved(run, 5), "step 7 and a checkpoint of step 5")
        running.kill(signal.SIGKILL)
        running.wait(10)
        release()
        assert here("resume", run, cwd=tmp_path) == 0
    assert weights(run) == weights(undisturbed)


# --- a lost disk --------------------------------------------------------------------------------


@pytest.mark.slow
def test_failed_background_save_ends_the_run_with_one_report(tmp_path: Path, undisturbed: Path) -> None:
    run = tmp_path / "runs" / "a"
    release = hold(tmp_path, 7)
    arguments = ("train", RECIPE, "--name", "a", *BLOCKING, "--processes", 2, "--checkpoint-every", 5)
    with Running(*arguments, cwd=tmp_path) as running:
        for call in (7, 8, 9, 10):
            hold(tmp_path, call)
            running.until(lambda: count_calls(tmp_path) == call, f"call {call}")  # noqa: B023
            if events(run, "checkpoint"):  # of a save that is over
                break
            running.until(lambda: is_saved(run, 5), "a checkpoint of step 5")
            time.sleep(0.2)
        (run / "checkpoints").rename(run / "away")
        (run / "checkpoints").touch()
        release()
        done = running.wait(60)
    assert done.code == 1
    report = done.err[done.err.index("error:") :]
    assert report.startswith("error: the checkpoint of step 10 cannot be written to runs/a/checkpoints: ")
    assert report.count("error:") == 1
    assert "Traceback" not in done.err
    assert "earlier ones are unchanged" in report
    assert [event["step"] for event in events(run, "checkpoint")] == [5]
    assert len(events(run, "step")) < 15, "the run continued despite a failed save"

    (run / "checkpoints").unlink()
    (run / "away").rename(run / "checkpoints")
    assert here("resume", run, "--processes", 3, cwd=tmp_path) == 0
    assert weights(run) == weights(undisturbed)
    assert final_events(run) == final_events(undisturbed)


@pytest.mark.long
@pytest.mark.slow
def test_data_error_is_reported_first_with_the_failed_save_as_a_note(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    release = hold(tmp_path, 1)
    data = ("data.name=helpers.recorded:load_unreadable", "data.options={}")
    with Running("train", RECIPE, "--name", "a", *data, cwd=tmp_path) as running:
        running.until(lambda: count_calls(tmp_path) == 1, "the first step")
        (run / "checkpoints").touch()
        release()
        done = running.wait(60)
    assert done.code == 2
    first, *others = done.err[done.err.index("error:") :].splitlines()
    assert "sample 40" in first
    assert any(line.startswith("  also: ") and "the checkpoint of step " in line for line in others)


# --- a stop request during an evaluation --------------------------------------------------------------------


def in_evaluation(folder: Path, rank: int | str = "*") -> int:
    """Return the number of started calls of the loss in evaluation."""
    return sum(len(file.read_text().splitlines()) for file in folder.glob(f"evaluated-{rank}-*"))


def ended_in_evaluation(folder: Path, processes: int, *command: object) -> Done:
    """Run a command, and request a stop during the second call of an evaluation on rank 0."""
    for file in folder.glob("evaluated-*"):
        file.unlink()
    (folder / "hold-evaluation").touch()
    with Running(*command, "--processes", processes, cwd=folder) as running:
        running.until(lambda: in_evaluation(folder, 0) == 2, "an evaluation")
        running.kill_group(signal.SIGTERM)  # to all processes at once, so that none continues before the signal
        (folder / "hold-evaluation").unlink()
        return running.wait(60)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.long), 3])
def test_stop_request_ends_an_evaluation_and_resume_repeats_it(
    tmp_path: Path, undisturbed: Path, processes: int
) -> None:
    run = tmp_path / "runs" / "a"
    done = ended_in_evaluation(tmp_path, processes, "train", RECIPE, "--name", "a", *BLOCKING)
    assert done.code == 130
    assert not events(run, "evaluation")
    assert [event["step"] for event in events(run, "checkpoint")] == [13]
    stopped = state_of(run)
    assert stopped["cursor"] == {"epoch": 1, "samples": 0}
    assert stopped["loss_count"] > 0
    assert stopped["best"] is None

    # Stopped again in the same evaluation, now of a resumed run.
    assert ended_in_evaluation(tmp_path, 2, "resume", run).code == 130
    assert not events(run, "evaluation")
    assert state_of(run) == stopped

    assert here("resume", run, "--processes", 2, cwd=tmp_path) == 0
    assert weights(run) == weights(undisturbed)
    assert weights(run, "best") == weights(undisturbed, "best")
    assert state_of(run) == state_of(undisturbed)
    assert final_events(run) == final_events(undisturbed)
    assert [event["epoch"] for event in events(run, "evaluation")] == [1, 2, 3]
    assert steps_saved(run) == steps_saved(undisturbed)
