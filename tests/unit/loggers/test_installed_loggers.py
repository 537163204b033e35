"""Loggers of other packages, by entry points."""

from pathlib import Path

import pytest

from helpers.system import Running, events
from samestep.config import RunOptions
from samestep.errors import RecipeError
from samestep.loggers.trackers import create_loggers

PACKAGE = Path(__file__).parents[2] / "helpers" / "logger_package"
RECIPE = Path(__file__).parents[2] / "helpers" / "recorded.yaml"


def test_logger_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PACKAGE))
    options = RunOptions(loggers=("jsonl", "csv"))
    _, logger = create_loggers(options.loggers, tmp_path)
    logger.log_event({"event": "evaluation", "step": 1, "epoch": 1, "loss": 0.5})
    logger.close()
    assert (tmp_path / "metrics.csv").read_text(encoding="utf-8") == "1,0.5\n"
    with pytest.raises(RecipeError, match="unknown logger 'csvv'") as error:
        RunOptions(loggers=("csvv",))
    assert "wandb, csv" in error.value.expected


@pytest.mark.slow
def test_run_with_the_logger_of_a_package(tmp_path: Path) -> None:
    tests = Path(__file__).parents[2]
    variables = {"PYTHONPATH": f"{PACKAGE}:{tests.parent / 'src'}:{tests}"}
    options = ("--loggers", "jsonl,csv", "--name", "a", "--processes", 2)
    with Running("train", RECIPE, "epochs=2", *options, cwd=tmp_path, variables=variables) as running:
        done = running.wait(120)
    assert done.code == 0, done.err
    run = tmp_path / "runs" / "a"
    lines = (run / "metrics.csv").read_text(encoding="utf-8").splitlines()
    assert [float(line.partition(",")[2]) for line in lines] == [one["loss"] for one in events(run, "evaluation")]
