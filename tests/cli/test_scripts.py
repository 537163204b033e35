"""Scripts as subjects of `verify` and `profile`, with torchrun's variables as in `run`; other commands refuse them."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from helpers.system import answer, here
from samestep.errors import EXIT_DONE, EXIT_INPUT

Refused = Callable[..., str]
SCRIPT = """
import os, sys
import torch
import samestep

torch.manual_seed(0)
inputs = torch.randn(64, 6)
data = torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1).gt(0).long())
model = torch.nn.Linear(6, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
samestep.init()
assert "RANK" not in os.environ and "MASTER_ADDR" not in os.environ, dict(os.environ)
assert sys.argv[1:] == ["--epochs", "100"] and __name__ == "__main__", sys.argv
model = samestep.parallel(model)
batches = samestep.loader(data, batch_size=16)
for _ in range(int(sys.argv[2])):
    for rows, targets in batches:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(rows), targets).backward()
        optimizer.step()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    return tmp_path


@pytest.mark.slow
def test_verify_runs_a_script_as_one_process_sees_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--processes", "1,2", "--steps", 3, "--json", "--out", "out")
    assert here("verify", "train.py", *options, "--", "--epochs", 100, cwd=folder) == EXIT_DONE
    certificate = answer(capsys)
    assert (certificate["holds"], certificate["steps"]) == (True, [1, 2, 3])
    assert certificate["arguments"] == ["--epochs", "100"]
    assert json.loads((folder / "out" / "certificate.json").read_text(encoding="utf-8"))["holds"]


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.long)])
def test_profile_measures_the_steps_of_a_script(
    folder: Path, capsys: pytest.CaptureFixture[str], processes: int
) -> None:
    options = ("--processes", processes, "--active", 6, "--traced", 2, "--json", "--out", "out")
    assert here("profile", "train.py", *options, "--", "--epochs", 100, cwd=folder) == EXIT_DONE
    result = answer(capsys)
    assert result["recipe"] == {"script": "train.py", "arguments": ["--epochs", "100"]}
    assert (result["processes"], result["steps"]["active"]) == (processes, 6)
    for rank in result["ranks"]:
        assert rank["forward"] > 0
        assert rank["backward"] > 0
        assert rank["data"] > 0
    assert len(list((folder / "out" / "tensorboard").iterdir())) == processes
    assert (folder / "out" / "output-0.log").exists()


def test_script_with_too_few_steps_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "idle.py").write_text("import sys\nprint(sys.argv)\n", encoding="utf-8")
    options = ("--processes", 1, "--out", "out")
    assert here("profile", "idle.py", *options, cwd=folder) == EXIT_INPUT
    err = capsys.readouterr().err
    assert "idle.py made 0 of " in err
    assert "[E_SCRIPT]" in err


@pytest.mark.parametrize("command", ["verify", "profile"])
def test_invalid_scripts_and_options_are_errors(refused: Refused, folder: Path, command: str) -> None:
    assert "[E_FILE_MISSING]" in refused(command, "gone.py")
    for arguments in ("train.py epochs=1", "train.py --strategy ddp", "digits -- --epochs 1"):
        assert "[E_OPTION_CONFLICT]" in refused(command, *arguments.split())
