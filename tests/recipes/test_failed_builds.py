"""Runs that fail while the model is built, and notes on values that are valid but rarely meant."""

from pathlib import Path

import pytest

from helpers.system import events, here, tree
from samestep.errors import EXIT_DONE, EXIT_FAILED, EXIT_INPUT
from samestep.tools.top.run_status import RunReader

RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"


@pytest.mark.parametrize("microbatches", [pytest.param(8, marks=pytest.mark.slow), "auto"])
def test_options_that_a_model_refuses_leave_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], microbatches: object
) -> None:
    settings = ("model.options.width=-3", f"microbatches={microbatches}")
    assert here("train", "digits", "--name", "a", "--processes", 2, "--set", *settings, cwd=tmp_path) == EXIT_INPUT
    err = capsys.readouterr().err
    assert "model.options.width is -3" in err.splitlines()[0]
    assert "[E_VALUE]" in err.splitlines()[0]
    assert "Traceback" not in err
    assert not tree(tmp_path)


def test_failure_of_user_code_in_the_build_is_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_net.py").write_text("def net():\n    raise RuntimeError('not yet')\n", encoding="utf-8")
    monkeypatch.setattr("sys.path", [*__import__("sys").path])
    name = "model.name=broken_net:net"
    assert here("train", RECIPE, "--name", "a", "--set", name, cwd=tmp_path) == EXIT_FAILED
    assert "broken_net.py" in capsys.readouterr().err
    (failure,) = events(tmp_path / "runs" / "a", "failure")
    assert (failure["code"], failure["text"]) == ("E_RANK_FAILED", "RuntimeError: not yet")
    assert RunReader(tmp_path / "runs" / "a").read().state == "failed"


@pytest.mark.parametrize(("warmup", "is_noted"), [("1.5", True), pytest.param("1", False, marks=pytest.mark.slow)])
def test_warmup_longer_than_the_run_is_noted(tmp_path: Path, warmup: str, is_noted: bool) -> None:
    settings = (f"schedule.warmup_epochs={warmup}", "epochs=1")
    assert here("train", RECIPE, "--name", "a", "--set", *settings, cwd=tmp_path) == EXIT_DONE
    notes = [event["text"] for event in events(tmp_path / "runs" / "a", "note")]
    text = "warning: schedule.warmup_epochs is 1.5 and epochs is 1: the learning rate does not reach its full value"
    assert (text in notes) == is_noted
    assert any("schedule.warmup_epochs" in note for note in notes) == is_noted
