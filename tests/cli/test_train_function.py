"""`samestep.train` computes what `samestep train` does, and returns the summary."""

import json
from pathlib import Path

import pytest

import samestep
from helpers.system import here, state_of, weights
from samestep.errors import InputError

OPTIONS = {"epochs": 1, "model.options.width": 8, "batch_size": 128, "metrics": [], "optimizer.options.lr": 1e-05}


def test_run_is_that_of_the_command(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    summary = samestep.train("digits", OPTIONS, processes=2, name="function", runs=runs, exact=True)
    settings = [f"{key}={json.dumps(value)}" for key, value in OPTIONS.items()]
    assert here("train", "digits", "--name", "command", "--exact", "--set", *settings, cwd=tmp_path) == 0
    assert summary["run"] == str(runs / "function")
    assert summary["step"] == state_of(runs / "function")["step"] > 0
    assert not summary["stopped"]
    assert summary["evaluation"]["samples"] > 0
    assert weights(runs / "function") == weights(runs / "command")


def test_summary_is_not_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="unknown key epoch") as raised:
        samestep.train("digits", {"epoch": 1}, runs=tmp_path / "runs")
    assert raised.value.code == "E_UNKNOWN_KEY"
    assert not (tmp_path / "runs").exists()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("name", ["epochs", "json"])
def test_unknown_option_is_an_error(name: str) -> None:
    with pytest.raises(InputError, match=f"samestep.train has no option {name}") as raised:
        samestep.train("digits", **{name: 1})
    assert raised.value.code == "E_UNKNOWN_OPTION"
