"""A recipe of images gives one SHA-256 on any number of processes and workers, also killed and resumed."""

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers.photos import FOLDER_STEPS, FOLDERS, write_folders
from helpers.system import Running, events, here, last_saved, state_of, weights

LONG = pytest.mark.long


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    write_folders(root)
    return root


@pytest.fixture(scope="module")
def alone(data: Path) -> tuple[str, str]:
    """Weights of one process without workers."""
    assert here("train", "images", "--exact", "--name", "alone", *FOLDERS, cwd=data) == 0
    assert len(events(data / "runs/alone", "step")) == 2 * FOLDER_STEPS
    return weights(data / "runs/alone")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("processes", "workers"),
    [
        (3, 0),
        *(pytest.param(*case, marks=LONG) for case in ((1, 3), (2, 0), (2, 3), (3, 3), (4, 0), (4, 3))),
    ],
)
def test_processes_and_workers_change_no_bit(processes: int, workers: int, data: Path, alone: tuple[str, str]) -> None:
    name, machine = f"images-{processes}-{workers}", ("--processes", processes, "--workers", workers)
    assert here("train", "images", "--exact", "--name", name, *machine, *FOLDERS, cwd=data) == 0
    assert weights(data / "runs" / name) == alone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("killed", "resumed", "workers"),
    [(2, 3, 3), *(pytest.param(*case, marks=LONG) for case in ((4, 1, 0), (1, 4, 3), (3, 2, 0)))],
)
def test_killed_run_resumes_on_another_number_with_the_same_bits(
    killed: int, resumed: int, workers: int, data: Path, alone: tuple[str, str]
) -> None:
    name = f"killed-{killed}"
    kill(data, "images", name, killed, workers, FOLDERS)
    assert state_of(data / "runs" / name)["step"] % FOLDER_STEPS
    machine = ("--processes", resumed, "--workers", 3 - workers)
    assert here("resume", f"runs/{name}", *machine, cwd=data) == 0
    assert weights(data / "runs" / name) == alone


def kill(root: Path, recipe: str, name: str, processes: int, workers: int, settings: Sequence[str]) -> None:
    """Train, and kill all processes after a checkpoint within the first epoch."""
    run, machine = root / "runs" / name, ("--processes", processes, "--workers", workers, "--checkpoint-every", 3)
    with Running("train", recipe, "--exact", "--name", name, *machine, *settings, cwd=root) as running:
        running.until(lambda: last_saved(run), "a checkpoint", 90)
        running.kill_group(signal.SIGKILL)
        running.wait(30)
    assert not events(run, "end")
