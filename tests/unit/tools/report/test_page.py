"""Differences of recipes."""

from samestep.tools.report.page import recipe_differences


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
