"""Recipes key by key."""

from samestep.tools.report.recipe_keys import differing, flat


def test_leaves_have_their_whole_keys() -> None:
    recipe = {"epochs": 2, "optimizer": {"name": "sgd", "options": {"lr": 0.1}}, "metrics": ["a"], "options": {}}
    assert flat(recipe) == {
        "epochs": "2",
        "optimizer.name": "sgd",
        "optimizer.options.lr": "0.1",
        "metrics": '["a"]',
        "options": "{}",
    }


def test_only_keys_that_differ_are_told() -> None:
    one = {"seed": 0, "optimizer": {"lr": 0.1}, "ema": None}
    two = {"seed": 0, "optimizer": {"lr": 0.2, "momentum": 0.9}, "ema": None}
    assert differing([one, two, one]) == {
        "optimizer.lr": ["0.1", "0.2", "0.1"],
        "optimizer.momentum": [None, "0.9", None],
    }
    assert differing([one, one]) == {}
    assert differing([one]) == {}
