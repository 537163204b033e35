"""Settings of recipes: short keys and paths."""

from pathlib import Path

import pytest

from samestep.errors import RecipeError
from samestep.recipes.overrides import full_key
from samestep.recipes.recipe_files import load_recipe, recipe_data

DIGITS = recipe_data(load_recipe("digits"))

SHORT = {
    "lr": "optimizer.options.lr",
    "momentum": "optimizer.options.momentum",
    "path": "data.options.path",
    "seed": "step.seed",
    "width": "model.options.width",
    "options.width": "model.options.width",
    "mesh.shard": "strategy.mesh.shard",
    "epochs": "epochs",
    "step.seed": "step.seed",
    "qwertz": "qwertz",
}


@pytest.mark.parametrize("key", SHORT)
def test_end_of_one_key_is_the_key(key: str) -> None:
    assert full_key(DIGITS, key) == SHORT[key]


def test_end_of_several_keys_is_an_error() -> None:
    with pytest.raises(RecipeError, match="name is the end of 6 keys") as error:
        full_key(DIGITS, "name", "sgd")
    assert "optimizer.name=sgd" in error.value.fix


def test_short_keys_are_those_of_the_recipe() -> None:
    recipe = load_recipe("digits", ["lr=0.5", "seed=3", "width=8"])
    full = ["optimizer.options.lr=0.5", "step.seed=3", "model.options.width=8"]
    assert recipe == load_recipe("digits", full)


def test_paths_are_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PLACE", "/data")
    recipe = load_recipe("images", ["path=~/photos", "evaluation_path=$PLACE/val", "model.pretrained=$GONE/a.pth"])
    assert recipe.data.options["path"] == f"{tmp_path}/photos"
    assert recipe.data.options["evaluation_path"] == "/data/val"
    assert recipe.model.pretrained == "$GONE/a.pth"


def test_other_values_are_not_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/a")
    assert load_recipe("digits", ["best_by=loss_~", "data.options.x=~/a"]).data.options["x"] == "~/a"
