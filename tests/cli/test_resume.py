"""`samestep resume`: the bits of a run without a stop; and jobs that Slurm requeues."""

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from helpers.system import Done, Running, events, here, state_of, steps_saved, tree, weights
from samestep.recipes.recipe_files import read_recipe

RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"
EXACT = "step.reduction=exact"
COSINE = ("schedule.name=cosine", "schedule.final=0.1")


def rates(run: Path) -> dict[int, float]:
    return {event["step"]: event["lr"] for event in events(run, "step")}


@pytest.mark.slow
def test_a_finished_run_continues_with_more_epochs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With a schedule that does not depend on the number of epochs, the bits are those of a longer run."""
    run, longer = tmp_path / "runs" / "a", tmp_path / "runs" / "longer"
    assert here("train", RECIPE, "--name", "a", "epochs=1", EXACT, cwd=tmp_path) == 0
    assert here("resume", run, "epochs=2", "--processes", 2, cwd=tmp_path) == 0
    (start,) = events(run, "resume")
    assert start["text"] == "resuming after step 13: epoch 2/2, step 1/13 (before: 1 epoch)"
    assert here("train", RECIPE, "--name", "longer", "epochs=2", EXACT, cwd=tmp_path) == 0
    assert weights(run) == weights(longer)
    assert state_of(run) == state_of(longer)
    assert read_recipe(run / "recipe.yaml") == read_recipe(longer / "recipe.yaml")
    assert [event["epoch"] for event in events(run, "evaluation")] == [1, 2]
    ends = {link.name: link.readlink().name for link in (run / "checkpoints").glob("epoch-*")}
    assert ends == {"epoch-1": "step-000000013", "epoch-2": "step-000000026"}

    # A later resumption has the same number; fewer epochs than the complete ones are refused.
    assert here("resume", run, cwd=tmp_path) == 0
    assert weights(run) == weights(longer)
    capfd.readouterr()
    before = tree(run / "checkpoints"), (run / "recipe.yaml").read_bytes()
    assert here("resume", run, "epochs=1", cwd=tmp_path) == 2
    assert "[E_VALUE]" in capfd.readouterr().err
    assert (tree(run / "checkpoints"), (run / "recipe.yaml").read_bytes()) == before
    assert here("eval", run, "--checkpoint", "epoch-1", "--json", cwd=tmp_path) == 0
    assert json.loads(capfd.readouterr().out)["step"] == 13


@pytest.mark.slow
def test_the_schedule_of_a_continued_run_is_that_of_the_new_number_of_epochs(tmp_path: Path) -> None:
    run, longer = tmp_path / "runs" / "a", tmp_path / "runs" / "longer"
    assert here("train", RECIPE, "--name", "a", *COSINE, "epochs=1", cwd=tmp_path) == 0
    assert here("resume", run, "epochs=2", cwd=tmp_path) == 0
    assert here("train", RECIPE, "--name", "longer", *COSINE, "epochs=2", cwd=tmp_path) == 0
    continued, expected = rates(run), rates(longer)
    assert len(continued) == 26
    assert continued[13] < expected[13]
    assert {step: continued[step] for step in range(14, 27)} == {step: expected[step] for step in range(14, 27)}


@pytest.mark.slow
@pytest.mark.parametrize(("first", "code"), [(2, 1), (8, 0)])
def test_skipped_steps_are_counted_and_a_run_of_mostly_skipped_steps_fails(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], first: int, code: int
) -> None:
    """A process calls the loss once per step."""
    options = f"loss.options={{call: {first}}}"
    fault = ("loss.name=helpers.recorded:infinite_from_call", options, "step.non_finite=skip", "epochs=1")
    assert here("train", RECIPE, "--name", "a", *fault, cwd=tmp_path) == code
    run, (out, err) = tmp_path / "runs" / "a", capfd.readouterr()
    skipped = 14 - first
    assert sum(event["skipped"] for event in events(run, "step")) == skipped
    assert [event["skipped_steps"] for event in events(run, "evaluation")] == [skipped]
    assert state_of(run)["skipped_steps"] == skipped
    assert f"{skipped} of 13 steps" in out
    assert ("[E_NONFINITE]" in err) == (code == 1)


@pytest.mark.slow
def test_a_model_with_a_nan_loss_is_not_the_best(tmp_path: Path) -> None:
    """Its predictions still have an accuracy."""
    arguments = ("epochs=1", "batch_size=512", "loss.name=helpers.recorded:nan_in_evaluation")
    assert here("train", "digits", "--name", "a", *arguments, cwd=tmp_path) == 0
    run = tmp_path / "runs" / "a"
    (evaluation,) = events(run, "evaluation")
    assert evaluation["accuracy"] >= 0
    assert not evaluation["is_best"]
    assert sorted(path.name for path in (run / "checkpoints").glob("[a-z]*")) == ["epoch-1", "last", "step-000000003"]


@pytest.mark.slow
def test_or_resume_continues_the_run_of_the_name(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train = ("train", RECIPE, "--name", "a", "--or-resume")
    assert here(*train, "epochs=1", cwd=tmp_path) == 0
    assert here(*train, "epochs=2", cwd=tmp_path) == 0
    assert [event["epoch"] for event in events(tmp_path / "runs" / "a", "evaluation")] == [1, 2]
    capfd.readouterr()
    before = tree(tmp_path / "runs")
    assert here(*train, "epochs=2", "optimizer.options.lr=0.5", cwd=tmp_path) != 0
    assert "[E_RESUME_CHANGED]" in capfd.readouterr().err
    assert tree(tmp_path / "runs") == before
    assert here("train", RECIPE, "--or-resume", cwd=tmp_path) == 2
    assert "[E_OPTION_CONFLICT]" in capfd.readouterr().err


# --- changed data ---

NET = """
from torch import nn

class Net(nn.Sequential):
    def __init__(self, num_classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(3 * 16 * 16, num_classes))
"""
IMAGES = ("data.options.path=pictures", "data.options.image_size=16", "model.name=my_net:Net", "metrics=[accuracy]")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with the images of three classes and a run of them: 21 training images, 3 steps per epoch."""
    place = tmp_path_factory.mktemp("trained")
    (place / "my_net.py").write_text(NET, encoding="utf-8")
    for name in ("lemon", "lime", "orange"):
        (place / "pictures" / name).mkdir(parents=True)
        for number in range(12):
            Image.new("RGB", (16, 16), (number, 0, 0)).save(place / "pictures" / name / f"{number:03}.png")
    options = ("--workers", 0, "--checkpoint-every", 1, "--keep", 9)
    sizes = ("epochs=1", "batch_size=8", "microbatches=2")
    assert here("train", "images", "--name", "a", *options, *IMAGES, *sizes, cwd=place) == 0
    return place


@pytest.fixture
def project(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "project", symlinks=True)


def rename_class(pictures: Path) -> None:
    """Rename the first class to a name that is the last one."""
    (pictures / "lemon").rename(pictures / "zitrone")


def add_images(pictures: Path) -> None:
    for number in range(5):
        shutil.copy(pictures / "lime" / "000.png", pictures / "lime" / f"new{number}.png")


def rename_image(pictures: Path) -> None:
    """Leave the number of images as it is."""
    (pictures / "lime" / "003.png").rename(pictures / "lime" / "new.png")


@pytest.mark.parametrize(
    ("change", "step", "text"),
    [
        (rename_class, "last", "training data: classes is lime, orange, zitrone (3 in all, hash "),
        (add_images, "2", "training data: samples is "),
        (rename_image, "2", "training data: fingerprint is "),
    ],
)
def test_resume_with_changed_data_needs_acceptance(
    project: Path, capfd: pytest.CaptureFixture[str], change: Callable[[Path], None], step: str, text: str
) -> None:
    run = project / "runs" / "a"
    resume = ("resume", run, "--checkpoint", step, "--workers", 0, "epochs=2")
    change(project / "pictures")
    before = tree(run / "checkpoints"), (run / "data.json").read_bytes()
    assert here(*resume, cwd=project) == 2
    error = capfd.readouterr().err
    assert "[E_RESUME_CHANGED]" in error.partition("\n")[0]
    assert text in error
    assert "samestep resume RUN --accept-changes" in error
    assert (tree(run / "checkpoints"), (run / "data.json").read_bytes()) == before
    assert here(*resume, "--accept-changes", cwd=project) == 0
    assert any(event["text"].startswith(f"continuing with a change: {text}") for event in events(run, "note"))
    assert here("resume", run, "--workers", 0, cwd=project) == 0


@pytest.mark.slow
def test_accepted_data_are_saved_before_the_first_step(project: Path) -> None:
    """An automatic restart compares the data with those of the newest checkpoint."""
    run = project / "runs" / "a"
    add_images(project / "pictures")
    assert here("resume", run, "--checkpoint", 2, "--accept-changes", "--workers", 0, cwd=project) == 0
    assert [event["step"] for event in events(run, "checkpoint")] == [1, 2, 3, 2, 4]


@pytest.mark.slow
def test_resume_keeps_as_many_checkpoints_as_the_last_start(project: Path) -> None:
    run = project / "runs" / "a"
    for epochs, option, steps in ((2, (), [1, 2, 3, 6]), (3, ("--keep", 2), [6, 9]), (4, (), [9, 12])):
        assert here("resume", run, "--workers", 0, *option, f"epochs={epochs}", cwd=project) == 0
        best = state_of(run, "best")["step"]
        assert steps_saved(run) == sorted({best, *steps})


# --- requeued jobs ---

TRAIN = ("train", RECIPE, "--name", "a", "--processes", 2, "--requeue")


def job(folder: Path, *, code: int = 0, restarts: int = 0) -> dict[str, str]:
    """Return the variables of a batch script, with an `scontrol` that exits with `code`."""
    programs = folder / "bin"
    programs.mkdir(exist_ok=True)
    scontrol = programs / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {folder}/requests\necho "job is not yours" >&2\nexit {code}\n')
    scontrol.chmod(0o755)
    variables = {"SLURM_JOB_ID": "4711", "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    return variables | ({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {})


def stop_in_step_7(folder: Path, number: signal.Signals, variables: dict[str, str]) -> Done:
    """Send the signal in step 7 and return the result of the command."""
    hold = folder / "hold"
    hold.write_text("0 7", encoding="utf-8")
    with Running(*TRAIN, cwd=folder, variables=variables) as running:
        running.until(
            lambda: any(len(path.read_text().splitlines()) >= 7 for path in folder.glob("seen-0-*")), "step 7"
        )
        running.kill(number)
        time.sleep(0.2)  # the request reaches the rank before the next steps
        hold.unlink()
        return running.wait(20)


@pytest.mark.slow
def test_job_is_requeued_and_resumes_its_run(tmp_path: Path) -> None:
    done = stop_in_step_7(tmp_path, signal.SIGUSR1, job(tmp_path))
    assert done.code == 130
    assert done.err.endswith("job 4711 is requeued\n")
    assert (tmp_path / "requests").read_text() == "requeue 4711\n"
    step = state_of(tmp_path / "runs/a")["step"]
    assert 4 <= step < 13
    with Running(*TRAIN, cwd=tmp_path, variables=job(tmp_path, restarts=1)) as running:
        assert running.wait(60).code == 0
    assert (tmp_path / "requests").read_text() == "requeue 4711\n", "the second attempt completed"
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    assert here("train", RECIPE, "--name", "a", cwd=undisturbed) == 0
    assert weights(tmp_path / "runs/a") == weights(undisturbed / "runs/a")


@pytest.mark.slow
def test_other_signals_do_not_requeue(tmp_path: Path) -> None:
    done = stop_in_step_7(tmp_path, signal.SIGTERM, job(tmp_path))
    assert done.code == 130
    assert not (tmp_path / "requests").exists()


@pytest.mark.slow
def test_failed_requeue_is_an_error_after_the_checkpoint(tmp_path: Path) -> None:
    done = stop_in_step_7(tmp_path, signal.SIGUSR1, job(tmp_path, code=1))
    assert done.code == 1
    assert "error: job 4711 was not requeued: job is not yours [E_JOB]\n" in done.err
    assert (tmp_path / "runs/a/checkpoints/last").exists()


def test_requeue_without_a_job_is_an_error(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert "--requeue, but SLURM_JOB_ID is not set" in refused("train", "digits", "--requeue")
