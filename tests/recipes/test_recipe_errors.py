"""Errors of recipe keys and values: the values that they suggest."""

import shlex
from pathlib import Path

import pytest

from samestep.errors import RecipeError
from samestep.recipes.recipe_files import load_recipe

INVALID = {
    "epochs=abc": "epochs=15",
    "epochs=0": "epochs=15",
    "batch_size=null": "batch_size=64",
    "precision=fp8": "step.precision=fp32",
    "schedule.name=cosin": "schedule.name=cosine",
    "step.seed=-1": "step.seed=0",
    "data=photos": "data.options.path=photos",
    "model=resnet18": "model.name=resnet18",
    "batchsize=32": "batch_size=32",
    "step.reductoin=fast": "step.reduction=fast",
    "optimizer.layer_decy=1": "optimizer.layer_decay=1",
    "optimizer.option.lr=1": "optimizer.options.lr=1",
    "data.cache=1": "data.options.cache=1",
    "schedule.warmup=1": "schedule.warmup_epochs=1",
    "data.options.x=[1": "'data.options.x=\"[1\"'",
}


@pytest.mark.parametrize("setting", INVALID)
def test_suggested_setting_is_accepted(setting: str) -> None:
    with pytest.raises(RecipeError) as error:
        load_recipe("digits", [setting])
    suggested = error.value.fix.removeprefix("did you mean ").removesuffix("?")
    assert suggested == INVALID[setting]
    load_recipe("digits", shlex.split(suggested))


@pytest.mark.parametrize(("key", "value"), [("batch_size", "none"), ("epochs", "many")])
def test_suggestion_for_a_file_is_accepted(tmp_path: Path, key: str, value: str) -> None:
    text = "data: {name: digits}\nmodel: {name: digits_net}\noptimizer: {name: sgd}\n"
    values = {"batch_size": 64, "epochs": 1, key: value}
    path = tmp_path / "mine.yaml"
    path.write_text(text + "".join(f"{name}: {one}\n" for name, one in values.items()), encoding="utf-8")
    with pytest.raises(RecipeError) as error:
        load_recipe(str(path))
    load_recipe(str(path), [error.value.fix])
