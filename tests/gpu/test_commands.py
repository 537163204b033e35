"""Commands on one GPU: `pytest -m gpu` on a machine with one."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.system import Done, Running, samestep, weights

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here"),
]
EXAMPLES = Path(__file__).parents[2] / "examples"
SHARED = {"SAMESTEP_SHARE_GPU": "1"}
SMALL = ("--exact", "epochs=2")


def result(done: Done) -> dict[str, Any]:
    assert done.code == 0, done.err
    return json.loads(done.out.splitlines()[-1])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs on one rank."""
    folder = tmp_path_factory.mktemp("run")
    done = samestep("train", "digits", *SMALL, "--device", "cuda", "--processes", "1", "--json", cwd=folder)
    return folder / result(done)["run"]


@pytest.mark.parametrize("processes", [2, 4])
def test_ranks_that_share_the_gpu_train_the_weights_of_one(run: Path, processes: int, tmp_path: Path) -> None:
    options = ("--device", "cuda", "--share-gpu", "--processes", processes, "--json")
    shared = tmp_path / result(samestep("train", "digits", *SMALL, *options, cwd=tmp_path))["run"]
    assert weights(shared) == weights(run)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_train_with_mixed_precision(precision: str, tmp_path: Path) -> None:
    options = ("epochs=2", f"step.precision={precision}", "--device", "cuda", "--processes", "1", "--json")
    assert result(samestep("train", "digits", *options, cwd=tmp_path))["evaluation"]["accuracy"] > 0.5


def test_train_with_compilation_and_channels_last(tmp_path: Path) -> None:
    for setting in ("step.compile=true", "step.channels_last=true"):
        options = ("epochs=1", setting, "--device", "cuda", "--processes", "1", "--json")
        assert result(samestep("train", "digits", *options, cwd=tmp_path))["step"] == 23


def test_resume_on_two_ranks_has_the_weights_of_one(tmp_path: Path) -> None:
    first = ("train", "digits", "--exact", "epochs=1", "--device", "cuda", "--processes", "1", "--json")
    run = tmp_path / result(samestep(*first, cwd=tmp_path))["run"]
    second = ("epochs=2", "--device", "cuda", "--json")
    resumed = samestep("resume", run, *second, "--share-gpu", "--processes", "2", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    whole = tmp_path / "whole"
    whole.mkdir()
    one = samestep("train", "digits", "--exact", *second, "--processes", "1", cwd=whole)
    assert weights(run) == weights(whole / result(one)["run"])


@pytest.mark.parametrize(
    "command",
    [
        ("eval", "RUN", "--device", "cuda"),
        ("diff", "RUN", "--step", "20"),
        ("report", "RUN"),
        ("verify", "digits", "--device", "cuda", "--processes", "1,2"),
        ("bench", "digits", "--device", "cuda", "--devices", "1", "--rounds", "2", "--steps", "5"),
        ("profile", "digits", "--device", "cuda", "--processes", "1"),
        ("train", "tokens", "--device", "cuda", "epochs=1"),
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_command_succeeds(command: tuple[str, ...], run: Path, tmp_path: Path) -> None:
    words = [str(run) if word == "RUN" else word for word in command]
    with Running(*words, cwd=tmp_path, variables=SHARED) as running:
        done = running.wait(300)
    assert done.code == 0, done.out[-2000:] + done.err[-2000:]


@pytest.mark.parametrize("example", ["own_loop.py", "migrate/ddp_after.py", "migrate/plain_after.py"])
def test_example_runs(example: str, tmp_path: Path) -> None:
    with Running(EXAMPLES / example, cwd=tmp_path, variables=SHARED, command=[sys.executable]) as running:
        done = running.wait(200)
    assert done.code == 0, done.err[-2000:]
