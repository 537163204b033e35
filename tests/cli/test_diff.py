"""`samestep diff` on runs of recipes, whose directories are only read."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.system import TESTS, here, tree

RECIPE = TESTS / "helpers" / "recorded.yaml"


def train(folder: Path, name: str, *overrides: str, options: tuple[object, ...] = (), every: int = 1) -> Path:
    arguments = ("--name", name, "--checksum-every", every, *options, "epochs=1", *overrides)
    assert here("train", RECIPE, *arguments, cwd=folder) == 0
    return folder / "runs" / name


@pytest.mark.slow
def test_equal_runs_and_a_run_with_another_seed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def compared(*runs: Path) -> tuple[int, dict[str, Any]]:
        capfd.readouterr()
        code = here("diff", *runs, "--json", cwd=tmp_path)
        return code, json.loads(capfd.readouterr().out)

    one = train(tmp_path, "one")
    other = train(tmp_path, "other", options=("--processes", 2))
    seeded = train(tmp_path, "seeded", "step.seed=1")
    before = tree(tmp_path / "runs")
    code, data = compared(one, other)
    assert (code, data["equal"], data["first_different"], data["compared"]) == (0, True, None, 13)
    assert data["recipe"] == []
    assert "processes: 1 -> 2" in data["environment"]
    code, data = compared(one, seeded)
    assert (code, data["equal"], data["first_different"]) == (3, False, 1)
    assert data["recipe"] == ["step.seed: 0 -> 1"]
    assert tree(tmp_path / "runs") == before


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("runs/a",), "E_MISSING_KEY"),
        (("runs/a", "runs/missing"), "E_NOT_A_RUN"),
        (("runs/a", "runs/silent"), "E_NO_CHECKSUM"),
    ],
)
def test_invalid_input(runs: Path, refused: Callable[..., str], arguments: tuple[object, ...], code: str) -> None:
    assert f"[{code}]" in refused("diff", *arguments, "--json")


@pytest.fixture
def runs(tmp_path: Path, runs_of_module: Path) -> Path:
    (tmp_path / "runs").symlink_to(runs_of_module)
    return tmp_path


@pytest.fixture(scope="module")
def runs_of_module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train(folder, "a")
    train(folder, "silent", every=0)
    return folder / "runs"
