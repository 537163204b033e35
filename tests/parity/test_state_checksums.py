"""The checksums of the state in `events.jsonl` are the same on every number of processes and after a resumption."""

import signal
from pathlib import Path

import pytest

from helpers.system import Running, events, here, last_saved

pytestmark = pytest.mark.slow
RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"
STEPS = 26  # in two epochs
SET = ("epochs=2", "ema.decay=0.9", "schedule.name=cosine", "step.clip_norm=1.0")


def train(folder: Path, name: str, *options: object) -> dict[int, str]:
    """Train the recipe with a checksum after each step, and return the checksums by step."""
    arguments = ("--name", name, "--checksum-every", 1, *SET, *options)
    assert here("train", RECIPE, "--exact", *arguments, cwd=folder) == 0
    return checksums(folder / "runs" / name)


def checksums(run: Path) -> dict[int, str]:
    return {event["step"]: event["checksum"] for event in events(run, "checksum")}


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[int, str]:
    return train(tmp_path_factory.mktemp("alone"), "alone")


def test_each_step_has_another_checksum(alone: dict[int, str]) -> None:
    assert list(alone) == list(range(1, STEPS + 1))
    assert len(set(alone.values())) == STEPS
    assert all(len(value) == 16 and int(value, 16) >= 0 for value in alone.values())


@pytest.mark.long
@pytest.mark.parametrize("processes", [2, 3, 4])
def test_processes_have_the_checksums_of_one(alone: dict[int, str], tmp_path: Path, processes: int) -> None:
    assert train(tmp_path, "other", "--processes", processes) == alone


def test_killed_and_resumed_run_continues_the_series(alone: dict[int, str], tmp_path: Path) -> None:
    run = tmp_path / "runs" / "killed"
    (tmp_path / "hold").write_text("0 18", encoding="utf-8")  # the loss of rank 0 in step 18
    arguments = ("--name", "killed", "--processes", 2, "--checksum-every", 1, "--checkpoint-every", 4, *SET)
    with Running("train", RECIPE, "--exact", *arguments, cwd=tmp_path) as running:
        running.until(lambda: 17 in checksums(run) and last_saved(run) == 16, "step 17")
        running.kill(signal.SIGKILL)
        running.wait(20)
    (tmp_path / "hold").unlink()
    assert checksums(run) == {step: alone[step] for step in range(1, 18)}
    options = ("--processes", 3, "--checksum-every", 1)
    assert here("resume", run, *options, cwd=tmp_path) == 0
    assert [event["step"] for event in events(run, "checksum")][17:] == list(range(17, STEPS + 1))
    assert checksums(run) == alone
