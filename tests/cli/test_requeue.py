"""Requeueing of Slurm jobs after a stop by SIGUSR1.

A script that records its arguments replaces Slurm's `scontrol`, which needs a cluster.
"""

import os
import signal
import time
from pathlib import Path

import pytest

from helpers.system import Done, Running, here, state_of, weights

RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"
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


def test_requeue_without_a_job_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert here("train", "digits", "--requeue", cwd=tmp_path) == 2
    assert "--requeue, but SLURM_JOB_ID is not set" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
