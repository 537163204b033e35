"""Under Slurm a run that is asked to make room hands its job back, and goes on when Slurm starts it again.

Slurm's own `scontrol` needs a cluster; a program of the same name, which notes what it was called with, stands for it.
"""

import os
import signal
from pathlib import Path

import pytest

from system import Done, Running, here, state_of, weights

RECIPE = Path(__file__).parents[1] / "recorded.yaml"
TRAIN = ("train", RECIPE, "--name", "a", "--processes", 2, "--requeue")


def job(place: Path, *, code: int = 0, restarts: int = 0) -> dict[str, str]:
    """The variables of a batch script, with an `scontrol` that exits with `code`."""
    programs = place / "bin"
    programs.mkdir(exist_ok=True)
    scontrol = programs / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {place}/asked\necho "job is not yours" >&2\nexit {code}\n')
    scontrol.chmod(0o755)
    variables = {"SLURM_JOB_ID": "4711", "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    return variables | ({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {})


def stopped(place: Path, number: signal.Signals, variables: dict[str, str]) -> Done:
    """How it ends when it is asked to in step 7."""
    hold = place / "hold"
    hold.write_text("0 7", encoding="utf-8")
    with Running(*TRAIN, cwd=place, variables=variables) as running:
        running.until(lambda: any(len(path.read_text().splitlines()) >= 7 for path in place.glob("seen-0-*")), "step 7")
        running.kill(number)
        hold.unlink()
        return running.wait(20)


def test_the_job_is_handed_back_and_goes_on_with_its_run(tmp_path: Path) -> None:
    done = stopped(tmp_path, signal.SIGUSR1, job(tmp_path))
    assert done.code == 130
    assert done.err.endswith("job 4711 is requeued\n")
    assert (tmp_path / "asked").read_text() == "requeue 4711\n"
    step = state_of(tmp_path / "runs/a")["step"]
    assert 4 <= step < 13
    with Running(*TRAIN, cwd=tmp_path, variables=job(tmp_path, restarts=1)) as running:
        assert running.wait(60).code == 0
    assert (tmp_path / "asked").read_text() == "requeue 4711\n", "it ended by itself"
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    assert here("train", RECIPE, "--name", "a", cwd=undisturbed) == 0
    assert weights(tmp_path / "runs/a") == weights(undisturbed / "runs/a")


def test_who_ends_it_otherwise_wants_it_to_end(tmp_path: Path) -> None:
    done = stopped(tmp_path, signal.SIGTERM, job(tmp_path))
    assert done.code == 130
    assert not (tmp_path / "asked").exists()


def test_a_job_that_slurm_does_not_take_back_is_told_with_the_way_on(tmp_path: Path) -> None:
    done = stopped(tmp_path, signal.SIGUSR1, job(tmp_path, code=1))
    assert done.code == 1
    assert "error: job 4711 was not requeued: job is not yours\n" in done.err
    assert "rule: " in done.err
    assert (tmp_path / "runs/a/checkpoints/last").exists()


def test_without_a_job_there_is_nothing_to_requeue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    assert here("train", "digits", "--requeue", cwd=tmp_path) == 2
    assert "--requeue, but SLURM_JOB_ID is not set" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
