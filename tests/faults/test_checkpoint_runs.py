"""Whole runs whose saving is disturbed: by a second run, a disk that goes away, a request to end in an evaluation."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from recorded import seen_by
from system import Done, Running, events, here, samestep, state_of, steps_saved, weights

RECIPE = Path(__file__).parents[1] / "recorded.yaml"
HELD = ("--set", "loss.name=recorded:held_in_evaluation")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbs."""
    place = tmp_path_factory.mktemp("whole")
    assert here("train", RECIPE, "--name", "a", *HELD, cwd=place) == 0
    return place / "runs" / "a"


def told(run: Path) -> dict[str, object]:
    """What the events of a run say in the end, but for times and speed."""
    keys = {
        "step": ("loss", "lr", "grad_norm"),
        "evaluation": ("epoch", "train_loss", "loss", "samples", "is_best"),
    }
    return {kind: {e["step"]: [e[key] for key in keys[kind]] for e in events(run, kind)} for kind in keys}


def calls(place: Path) -> int:
    """Training calls of the loss that rank 0 has begun, in all runs there."""
    return sum(len(shards) for rank, shards in map(seen_by, place.glob("seen-*")) if rank == 0)


def hold(place: Path, call: int) -> Callable[[], None]:
    """Have rank 0 wait in a call of its loss, until what is returned is called."""
    (place / "hold").write_text(f"0 {call}", encoding="utf-8")
    return (place / "hold").unlink


def is_saved(run: Path, step: int) -> bool:
    return step in steps_saved(run) and not list((run / "checkpoints").glob(".*-*"))


# --- two runs in one directory ----------------------------------------------------------------------------


@pytest.mark.slow
def test_a_second_run_in_the_same_directory_is_refused_and_harms_nothing(tmp_path: Path, whole: Path) -> None:
    run = tmp_path / "runs" / "a"
    release = hold(tmp_path, 13)  # step 7, of one of two ranks
    arguments = ("train", RECIPE, "--name", "a", *HELD, "--processes", 2, "--checkpoint-every", 5)
    with Running(*arguments, cwd=tmp_path) as running:
        running.until(lambda: calls(tmp_path) == 13 and is_saved(run, 5), "step 7 and a checkpoint of step 5")
        processes = running.processes()
        before = (run / "events.jsonl").read_bytes(), (run / "environment.json").read_bytes()
        second = samestep("resume", run, "--processes", 2, cwd=tmp_path)
        assert second.code == 2
        first_line = second.err.splitlines()[0]
        assert first_line.startswith(f"error: {run} is in use by process ")
        assert int(first_line.removeprefix(f"error: {run} is in use by process ").split()[0]) in processes
        assert ((run / "events.jsonl").read_bytes(), (run / "environment.json").read_bytes()) == before
        release()
        assert running.wait(60).code == 0
    assert weights(run) == weights(whole)
    assert told(run) == told(whole)


def test_a_run_that_was_killed_keeps_nobody_out(tmp_path: Path, whole: Path) -> None:
    run = tmp_path / "runs" / "a"
    release = hold(tmp_path, 13)
    arguments = ("train", RECIPE, "--name", "a", *HELD, "--processes", 2, "--checkpoint-every", 5)
    with Running(*arguments, cwd=tmp_path) as running:
        running.until(lambda: calls(tmp_path) == 13 and is_saved(run, 5), "step 7 and a checkpoint of step 5")
        running.kill(signal.SIGKILL)
        running.wait(10)
        release()
        assert here("resume", run, cwd=tmp_path) == 0
    assert weights(run) == weights(whole)


# --- a disk that goes away --------------------------------------------------------------------------------


def test_a_save_that_fails_in_the_background_ends_the_run_with_one_report(tmp_path: Path, whole: Path) -> None:
    run = tmp_path / "runs" / "a"
    release = hold(tmp_path, 13)
    arguments = ("train", RECIPE, "--name", "a", *HELD, "--processes", 2, "--checkpoint-every", 5)
    with Running(*arguments, cwd=tmp_path) as running:
        running.until(lambda: calls(tmp_path) == 13 and is_saved(run, 5), "step 7 and a checkpoint of step 5")
        (run / "checkpoints").rename(run / "away")
        (run / "checkpoints").touch()
        release()
        done = running.wait(60)
    assert done.code == 1
    report = done.err[done.err.index("error:") :]
    assert report.startswith("error: the checkpoint of step 10 cannot be written to runs/a/checkpoints: ")
    assert report.count("error:") == 1
    assert "Traceback" not in done.err
    assert "those before it are as they were" in report
    assert [event["step"] for event in events(run, "checkpoint")] == [5]
    assert len(events(run, "step")) < 15, "the run went on though it could not save"

    (run / "checkpoints").unlink()
    (run / "away").rename(run / "checkpoints")
    assert here("resume", run, "--processes", 3, cwd=tmp_path) == 0
    assert weights(run) == weights(whole)
    assert told(run) == told(whole)


def test_the_last_save_of_a_run_is_there_or_the_run_has_failed(tmp_path: Path) -> None:
    arguments = ("--set", "epochs=1", "loss.name=recorded:held_in_evaluation")
    run = tmp_path / "runs" / "a"
    (tmp_path / "hold-evaluation").touch()
    with Running("train", RECIPE, "--name", "a", *arguments, cwd=tmp_path) as running:
        running.until(lambda: in_evaluation(tmp_path) == 2, "an evaluation")
        (run / "checkpoints").touch()
        (tmp_path / "hold-evaluation").unlink()
        done = running.wait(60)
    assert done.code == 1
    assert "the checkpoint of step 13 cannot be written" in done.err
    assert not events(run, "end")


def test_data_that_cannot_be_used_is_told_first_and_what_could_not_be_saved_with_it(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "a"
    release = hold(tmp_path, 1)
    data = ("--set", "data.name=recorded:load_unreadable", "data.options={}")
    with Running("train", RECIPE, "--name", "a", *data, cwd=tmp_path) as running:
        running.until(lambda: calls(tmp_path) == 1, "the first step")
        (run / "checkpoints").touch()
        release()
        done = running.wait(60)
    assert done.code == 2
    first, *others = done.err[done.err.index("error:") :].splitlines()
    assert "sample 40" in first
    assert any(line.startswith("  also: the checkpoint of step ") for line in others)


# --- a request to end in an evaluation --------------------------------------------------------------------


def in_evaluation(place: Path, rank: int | str = "*") -> int:
    """Calls of the loss in evaluation that have begun."""
    return sum(len(file.read_text().splitlines()) for file in place.glob(f"evaluated-{rank}-*"))


def ended_in_evaluation(place: Path, processes: int, *command: object) -> Done:
    """Run a command, and ask it to end while rank 0 is in its second call of an evaluation."""
    for file in place.glob("evaluated-*"):
        file.unlink()
    (place / "hold-evaluation").touch()
    with Running(*command, "--processes", processes, cwd=place) as running:
        running.until(lambda: in_evaluation(place, 0) == 2, "an evaluation")
        running.kill_group(signal.SIGTERM)  # to all processes at once, so that none goes on before it has it
        (place / "hold-evaluation").unlink()
        return running.wait(60)


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3])
def test_a_request_in_an_evaluation_ends_it_and_resume_makes_it(tmp_path: Path, whole: Path, processes: int) -> None:
    run = tmp_path / "runs" / "a"
    done = ended_in_evaluation(tmp_path, processes, "train", RECIPE, "--name", "a", *HELD)
    assert done.code == 130
    assert not events(run, "evaluation")
    assert [event["step"] for event in events(run, "checkpoint")] == [13]
    stood = state_of(run)
    assert stood["cursor"] == {"epoch": 1, "samples": 0}
    assert stood["loss_count"] > 0
    assert stood["best"] is None

    # Ended in the same evaluation again, now of a resumed run.
    assert ended_in_evaluation(tmp_path, 2, "resume", run).code == 130
    assert not events(run, "evaluation")
    assert state_of(run) == stood

    assert here("resume", run, "--processes", 2, cwd=tmp_path) == 0
    assert weights(run) == weights(whole)
    assert weights(run, "best") == weights(whole, "best")
    assert state_of(run) == state_of(whole)
    assert told(run) == told(whole)
    assert [event["epoch"] for event in events(run, "evaluation")] == [1, 2, 3]
    assert steps_saved(run) == steps_saved(whole)


# --- a bound on what is lost ------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 3])
def test_weights_do_not_depend_on_a_bound_on_lost_work(tmp_path: Path, whole: Path, processes: int) -> None:
    run = tmp_path / "runs" / "a"
    arguments = ("--lose-at-most", "0.001s", "--check-every", 1, "--processes", processes)
    assert here("train", RECIPE, "--name", "a", *HELD, *arguments, cwd=tmp_path) == 0
    assert weights(run) == weights(whole)
    assert told(run) == told(whole)
    assert state_of(run) == state_of(whole)
    notes = [event["text"] for event in events(run, "note")]
    assert [note for note in notes if "more than --lose-at-most allows" in note] == notes[-1:]
    saved = [event["step"] for event in events(run, "checkpoint")]
    assert set(saved) == set(range(1, 40))
    assert [step for step in saved if saved.count(step) == 2] == [13, 13, 26, 26, 39, 39]  # before its evaluation too


def test_a_bound_that_is_far_off_saves_nothing_more(tmp_path: Path, whole: Path) -> None:
    run = tmp_path / "runs" / "a"
    assert here("train", RECIPE, "--name", "a", *HELD, "--lose-at-most", "1h", cwd=tmp_path) == 0
    assert [event["step"] for event in events(run, "checkpoint")] == [13, 26, 39]
    assert weights(run) == weights(whole)
