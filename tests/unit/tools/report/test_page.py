"""Differences of recipes, and facts of runs."""

from pathlib import Path

import pytest

from helpers.run_folders import START, make_run
from samestep.tools.report.page import _facts, recipe_differences
from samestep.tools.report.run import read_run


@pytest.mark.parametrize(("metric", "fact"), [("accuracy", "best accuracy"), ("r2", "last r2")])
def test_value_of_unknown_direction_is_the_last_one(metric: str, fact: str, tmp_path: Path) -> None:
    events = [
        {"time": START + step, "event": "evaluation", "step": step, "samples": 5, metric: value}
        for step, value in ((10, 0.9), (20, 0.4))
    ]
    label, value, detail = _facts(read_run(make_run(tmp_path / "a", events), "a"))[0]
    expected = ("90.00%", "at step 10; last 40.00%") if fact.startswith("best") else ("40.00%", "at step 20")
    assert (label, value, detail) == (fact, *expected)


def test_values_of_dotted_keys() -> None:
    recipe = {"epochs": 2, "optimizer": {"name": "sgd", "options": {"lr": 0.1}}, "metrics": ["a"], "options": {}}
    assert recipe_differences([recipe, {}]) == {
        "epochs": ["2", None],
        "optimizer.name": ["sgd", None],
        "optimizer.options.lr": ["0.1", None],
        "metrics": ['["a"]', None],
        "options": ["{}", None],
    }


def test_only_keys_that_differ() -> None:
    one = {"seed": 0, "optimizer": {"lr": 0.1}, "ema": None}
    two = {"seed": 0, "optimizer": {"lr": 0.2, "momentum": 0.9}, "ema": None}
    assert recipe_differences([one, two, one]) == {
        "optimizer.lr": ["0.1", "0.2", "0.1"],
        "optimizer.momentum": [None, "0.9", None],
    }
    assert recipe_differences([one, one]) == {}
    assert recipe_differences([one]) == {}
