"""A recipe with a stream gives one SHA-256 on any number of processes and workers, also killed and resumed."""

import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers import sample_files
from helpers.sample_files import IMAGE_STEPS, IMAGES, TOKEN_STEPS, TOKENS
from helpers.system import Running, events, here, last_saved, state_of, weights

LONG = pytest.mark.long
SETTINGS = {"images": IMAGES, "language": TOKENS}
STEPS = {"images": IMAGE_STEPS, "language": TOKEN_STEPS}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    sample_files.write_images(root)
    sample_files.write_tokens(root)
    return root


@pytest.fixture(scope="module")
def alone(data: Path) -> dict[str, tuple[str, str]]:
    """Weights of one process without workers, by recipe."""
    for recipe, settings in SETTINGS.items():
        assert here("train", recipe, "--exact", "--name", f"{recipe}-alone", *settings, cwd=data) == 0
        assert len(events(data / f"runs/{recipe}-alone", "step")) == 2 * STEPS[recipe]
    return {recipe: weights(data / f"runs/{recipe}-alone") for recipe in SETTINGS}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "processes", "workers"),
    [
        ("images", 3, 0),
        ("language", 4, 3),
        *(
            pytest.param(recipe, *case, marks=LONG)
            for recipe in SETTINGS
            for case in ((1, 3), (2, 0), (2, 3), (3, 3), (4, 0))
        ),
        pytest.param("images", 4, 3, marks=LONG),
        pytest.param("language", 3, 0, marks=LONG),
    ],
)
def test_processes_and_workers_change_no_bit(
    recipe: str, processes: int, workers: int, data: Path, alone: dict[str, tuple[str, str]]
) -> None:
    name, machine = f"{recipe}-{processes}-{workers}", ("--processes", processes, "--workers", workers)
    assert here("train", recipe, "--exact", "--name", name, *machine, *SETTINGS[recipe], cwd=data) == 0
    assert weights(data / "runs" / name) == alone[recipe]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "killed", "resumed", "workers"),
    [
        ("images", 2, 3, 3),
        *(pytest.param("images", *case, marks=LONG) for case in ((4, 1, 0), (1, 4, 3), (3, 2, 0))),
        *(pytest.param("language", *case, marks=LONG) for case in ((2, 3, 3), (4, 1, 0), (1, 4, 3))),
    ],
)
def test_killed_run_resumes_on_another_number_with_the_same_bits(
    recipe: str, killed: int, resumed: int, workers: int, data: Path, alone: dict[str, tuple[str, str]]
) -> None:
    name = f"{recipe}-killed-{killed}"
    kill(data, recipe, name, killed, workers, SETTINGS[recipe])
    assert state_of(data / "runs" / name)["step"] % STEPS[recipe]
    machine = ("--processes", resumed, "--workers", 3 - workers)
    assert here("resume", f"runs/{name}", *machine, cwd=data) == 0
    assert weights(data / "runs" / name) == alone[recipe]


def kill(root: Path, recipe: str, name: str, processes: int, workers: int, settings: Sequence[str]) -> None:
    """Train, and kill all processes after a checkpoint within the first epoch."""
    run, machine = root / "runs" / name, ("--processes", processes, "--workers", workers, "--checkpoint-every", 3)
    with Running("train", recipe, "--exact", "--name", name, *machine, *settings, cwd=root) as running:
        running.until(lambda: last_saved(run), "a checkpoint", 90)
        running.kill_group(signal.SIGKILL)
        running.wait(30)
    assert not events(run, "end")
