"""A recipe with a stream gives one SHA-256 on any number of processes and workers, also killed and resumed."""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from helpers import sample_files
from helpers.sample_files import IMAGE_STEPS, IMAGES, LARGE, LARGE_BYTES, TOKEN_STEPS, TOKENS
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
        assert here("train", recipe, "--name", f"{recipe}-alone", "--set", *settings, cwd=data) == 0
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
    assert here("train", recipe, "--name", name, *machine, "--set", *SETTINGS[recipe], cwd=data) == 0
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
    with Running("train", recipe, "--name", name, *machine, "--set", *settings, cwd=root) as running:
        running.until(lambda: last_saved(run), "a checkpoint", 90)
        running.kill_group(signal.SIGKILL)
        running.wait(30)
    assert not events(run, "end")


# --- more data than memory --------------------------------------------------------------------------------

LIMIT = 40 << 20
FILES, SAMPLES = 80, 100  # 2 GiB


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("killed", "resumed", "workers"), [(2, 3, 3), (4, 1, 0)])
def test_data_of_fifty_times_the_memory(tmp_path: Path, killed: int, resumed: int, workers: int) -> None:
    assert FILES * SAMPLES * LARGE_BYTES >= 50 * LIMIT
    sample_files.write_large(tmp_path / "large", FILES, SAMPLES)
    sample_files.write_large(tmp_path / "large_val", 1, 20)
    assert here("train", "language", "--name", "alone", "--set", *LARGE, cwd=tmp_path) == 0
    kill(tmp_path, "language", "killed", killed, workers, LARGE)
    machine, sizes = ("--processes", resumed, "--workers", 3 - workers), list[int]()
    run = tmp_path / "runs/killed"
    with Running("resume", "runs/killed", *machine, cwd=tmp_path) as running:
        running.until(lambda: len(events(run, "step")) > 30, "steps", 90)
        while running.is_running():
            sizes.append(max(map(resident_memory, running.processes()), default=0))
        assert running.wait(60).code == 0
    assert weights(run) == weights(tmp_path / "runs/alone")
    half = len(sizes) // 2
    assert max(sizes[half:]) - max(sizes[:half]) < LIMIT


def resident_memory(process: int) -> int:
    """Return the resident bytes of a process without mapped files; 0 after its end."""
    try:
        rows = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 1024 * sum(int(row.split()[1]) for row in rows if row.startswith(("RssAnon", "RssShmem")))
