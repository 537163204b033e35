"""Tests of `samestep profile`: phases, the slowest rank, traces, and files of a script."""

import gzip
import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.system import answer, here, tree
from samestep.errors import EXIT_DONE
from samestep.tools.profile import PHASES

RECIPE = Path(__file__).parents[1] / "helpers" / "bottlenecks.yaml"
SAVING = Path(__file__).parents[1] / "helpers" / "saving_loop.py"
TWO = ("--processes", 2)


def run_profile(capsys: pytest.CaptureFixture[str], folder: Path, *arguments: object) -> Any:
    assert here("profile", RECIPE, "--json", "--out", "output", *arguments, cwd=folder) == EXIT_DONE
    return answer(capsys)


@pytest.mark.slow
def test_late_rank_is_the_slowest(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ("--warmup", 1, "--active", 8, "--traced", 0)
    late = ("model.options.late_rank=1", "model.options.seconds=0.05")
    result = run_profile(capsys, tmp_path, "--processes", 3, *options, *late)
    assert result["slowest"]["rank"] == 1
    assert result["slowest"]["phase"] == "forward"
    assert result["slowest"]["seconds"] > 0.03
    assert result["ranks"][0]["communication"] > result["ranks"][1]["communication"]


@pytest.mark.slow
def test_slow_data_is_waited_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    options = ("--warmup", 1, "--active", 4, "--traced", 0, "data.options.seconds=0.004")
    [rank] = run_profile(capsys, tmp_path, *options)["ranks"]
    assert rank["data"] > 0.1


@pytest.mark.slow
def test_phases_add_up_to_the_step_and_all_files_are_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    result = run_profile(capsys, tmp_path, *TWO, "--active", 4, "--traced", 2)
    seconds = [sum(rank[phase] for phase in PHASES) for rank in result["ranks"]]
    assert sum(seconds) / 2 == pytest.approx(result["step_seconds"])
    assert {path.name for path in (tmp_path / "output").iterdir()} == {"profile.json", "tensorboard"}
    assert not (tmp_path / "runs").exists()
    written = json.loads((tmp_path / "output" / "profile.json").read_text())
    assert {**written, "folder": "output"} == result
    files = sorted((tmp_path / result["tensorboard"]).iterdir())
    # Names that TensorBoard's plugin recognizes: worker, time, suffix.
    workers = [re.fullmatch(r"(.*?)(\.\d+)?\.pt\.trace\.json\.gz", path.name)[1] for path in files]
    assert workers == ["rank-0", "rank-1"]
    with gzip.open(files[0], "rt", encoding="utf-8") as file:
        names = Counter(event["name"] for event in json.load(file)["traceEvents"])
    # `optimizer` is entered after the backward and at the step of the optimizer.
    assert names["samestep: optimizer"] == 4
    assert names["samestep: data"] == names["samestep: forward"] == names["aten::nll_loss_forward"] == 2


@pytest.mark.slow
def test_without_traces_phases_are_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert here("profile", RECIPE, "--traced", 0, "--active", 2, "--out", "output", cwd=tmp_path) == EXIT_DONE
    output = capsys.readouterr().out
    assert all(word in output for word in ("forward", "optimizer", "profile.json"))
    assert "tensorboard" not in output
    assert [path.name for path in (tmp_path / "output").iterdir()] == ["profile.json"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [pytest.param("fsdp", marks=pytest.mark.long), "pp"])
def test_slowest_rank_of_a_divided_model_is_unknown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, strategy: str
) -> None:
    options = ("--strategy", strategy, *TWO, "--active", 2, "--traced", 0)
    result = run_profile(capsys, tmp_path, *options, "model.options.layers=4")
    assert result["slowest"] is None
    [first, second] = [[rank[phase] > 0 for phase in ("forward", "backward")] for rank in result["ranks"]]
    assert first == second == [True, True]


@pytest.mark.parametrize(
    ("arguments", "code"), [("--active 0", "E_VALUE"), ("--warmup -1", "E_VALUE"), ("--processes none", "E_PROCESSES")]
)
def test_invalid_input_creates_no_files(refused: Callable[..., str], arguments: str, code: str) -> None:
    assert f"[{code}]" in refused("profile", RECIPE, *arguments.split(), "--device", "cpu")


@pytest.mark.slow
def test_checkpoints_and_run_of_a_script_are_neither_read_nor_written(tmp_path: Path) -> None:
    shutil.copy(SAVING, tmp_path / "train.py")
    assert here("run", *TWO, "train.py", 2, cwd=tmp_path) == EXIT_DONE
    before = tree(tmp_path)
    assert "checkpoints/step-000000008/model.safetensors" in before
    options = ("--warmup", 0, "--active", 9, "--traced", 0, "--out", "output")
    for processes, epochs in ((2, 40), (1, 3)):
        (tmp_path / "positions.txt").unlink()
        assert here("profile", "train.py", "--processes", processes, *options, "--", epochs, cwd=tmp_path) == EXIT_DONE
        assert (tmp_path / "positions.txt").read_text(encoding="utf-8").split() == ["0"]
        assert {path.suffix for path in (tmp_path / "output").iterdir()} == {".json", ".log"}
        shutil.rmtree(tmp_path / "output")
        assert tree(tmp_path) == before
