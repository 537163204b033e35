"""`samestep.train` as `samestep train`, and the curves of a run in TensorBoard."""

import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

import samestep
from helpers.system import events, here, state_of, until, weights
from samestep.errors import InputError

OPTIONS = {"epochs": 1, "model.options.width": 8, "batch_size": 128, "metrics": [], "optimizer.options.lr": 1e-05}


def test_run_is_that_of_the_command(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    result = samestep.train("digits", OPTIONS, processes=2, name="function", runs=runs, exact=True)
    settings = [f"{key}={json.dumps(value)}" for key, value in OPTIONS.items()]
    assert here("train", "digits", "--name", "command", "--exact", *settings, cwd=tmp_path) == 0
    assert result.folder == runs / "function"
    assert result.step == state_of(result.folder)["step"] > 0
    assert not result.stopped
    (event,) = events(result.folder, "evaluation")
    assert result.metrics == {"loss": event["loss"], "samples": 360} == {**result.metrics, result.best_by: result.best}
    assert result.training == {"loss": event["train_loss"]}
    assert (result.best_epoch, result.skipped_steps) == (1, 0)
    assert weights(runs / "function") == weights(runs / "command")


def test_summary_is_not_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="unknown key epoch") as raised:
        samestep.train("digits", {"epoch": 1}, runs=tmp_path / "runs")
    assert raised.value.code == "E_UNKNOWN_KEY"
    assert not (tmp_path / "runs").exists()
    assert capfd.readouterr() == ("", "")


def test_training_accuracy_is_that_of_the_steps_also_after_a_resumption(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    small = ("epochs=1", "model.options.width=8", "batch_size=128", "--checkpoint-every=5", "--keep=20")
    assert here("train", "digits", "--name", "a", "--exact", "--processes", 2, *small, cwd=tmp_path) == 0
    out, err = capfd.readouterr()
    assert "starting 2 processes\n" in err
    (first,) = events(tmp_path / "runs" / "a", "evaluation")
    assert f"accuracy    {first['accuracy']:.2%}, in training {first['train_accuracy']:.2%}\n" in out
    assert f"accuracy {first['accuracy']:.2%} (epoch 1), last {first['accuracy']:.2%}\n" in out
    assert here("resume", "a", "--checkpoint", 5, "--processes", 1, cwd=tmp_path) == 0
    assert events(tmp_path / "runs" / "a", "evaluation")[-1]["train_accuracy"] == first["train_accuracy"]


@pytest.mark.parametrize("name", ["epochs", "json"])
def test_unknown_option_is_an_error(name: str) -> None:
    with pytest.raises(InputError, match=f"samestep.train has no option {name}") as raised:
        samestep.train("digits", **{name: 1})
    assert raised.value.code == "E_UNKNOWN_OPTION"


RECIPE = Path(__file__).parents[1] / "helpers" / "recorded.yaml"


@pytest.mark.slow
def test_the_printed_command_shows_the_curves(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Also without the programs of the environment on PATH."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", os.defpath)
        assert here("train", RECIPE, "--name", "a", "epochs=1", cwd=tmp_path) == 0
    (command,) = re.findall(r"^curves +(.*)$", capfd.readouterr().out, re.MULTILINE)
    expected = [(event["step"], pytest.approx(event["loss"])) for event in events(tmp_path / "runs" / "a", "step")]
    log = tmp_path / "log"
    with log.open("w", encoding="utf-8") as file:
        server = subprocess.Popen([*shlex.split(command), "--port", "0"], cwd=tmp_path, stdout=file, stderr=file)
    try:
        pattern = re.compile(r" at (http://localhost:\d+/)")
        until(lambda: pattern.search(log.read_text(encoding="utf-8")), "the address of TensorBoard", 60)
        (address,) = pattern.findall(log.read_text(encoding="utf-8"))
        url = f"{address}data/plugin/scalars/scalars?run=.&tag=train%2Floss"
        until(lambda: len(json.loads(read_url(url) or b"[]")) == len(expected), "the curve", 30)
        points = json.loads(read_url(url) or b"[]")
    finally:
        server.kill()
        server.wait()
    assert [(step, loss) for _, step, loss in points] == expected


def read_url(url: str) -> bytes | None:
    """Return the content, or None if there is none yet."""
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            content: bytes = response.read()
            return content
    except OSError:  # not ready
        return None
