"""Recipes as YAML files, with overrides, validation, and values that errors suggest."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.config import Recipe
from samestep.errors import RecipeError
from samestep.recipes.overrides import full_key
from samestep.recipes.recipe_files import (
    differences,
    load_recipe,
    make_recipe,
    read_recipe,
    recipe_data,
    shipped_recipes,
    write_recipe,
)


def raw(**more: Any) -> dict[str, Any]:
    """Return the smallest valid recipe."""
    smallest = {"data": {"name": "d"}, "model": {"name": "m"}, "optimizer": {"name": "o"}, "batch_size": 8, "epochs": 1}
    return {**smallest, **more}


def made(*overrides: str, **more: Any) -> Recipe:
    return make_recipe(raw(**more), overrides, origin="a test")


def test_shipped_recipes_are_valid() -> None:
    assert set(shipped_recipes()) >= {"digits", "images", "tokens"}
    for name in shipped_recipes():
        assert load_recipe(name).step.reduction == "fast"


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("1e-3", 1e-3),
        ("1E+2", 100.0),
        ("-2.5e3", -2500.0),
        (".5", 0.5),
        ("3", 3),
        ("1_000", 1000),
        ("true", True),
        ("null", None),
        ("", None),
        ("word", "word"),
        ("'3'", "3"),
        ("a=b", "a=b"),
        ("a:b", "a:b"),
        ("[1, 2e0]", [1, 2.0]),
        ("{a: {b: 1}}", {"a": {"b": 1}}),
        ("1e", "1e"),
        ("e-3", "e-3"),
        ("2024-01-01", "2024-01-01"),
        ("2020-13-45", "2020-13-45"),
        ("2001-12-14t21:59:43.10-05:00", "2001-12-14t21:59:43.10-05:00"),
    ],
)
def test_override_values_are_yaml(override: str, value: Any) -> None:
    result = made(f"data.options.x={override}").data.options["x"]
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        "!!set {a, b}",
        "!!binary aGk=",
        "!!timestamp 2020-01-01",
        "!!bool maybe",
        "!!int x",
        "0x_",
        "[" * 9999,
        r'"\ud83d"',
    ],
    ids=lambda value: value[:9],
)
def test_values_that_json_does_not_have_are_refused(value: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as error:
        made(f"data.options.x={value}")
    assert error.value.code == "E_VALUE"
    (tmp_path / "a.yaml").write_text(f"data: {value}\n", encoding="utf-8")
    with pytest.raises(RecipeError) as error:
        load_recipe(str(tmp_path / "a.yaml"))
    assert error.value.code == "E_UNREADABLE"


def test_integers_are_accepted_for_floats_but_not_the_reverse() -> None:
    assert made("schedule.warmup_epochs=2").schedule.warmup_epochs == 2.0
    assert made("step.clip_norm=1").step.clip_norm == 1.0
    for override in ("epochs=2.0", "epochs=1e1", "batch_size=true", "step.clip_norm='1'"):
        with pytest.raises(RecipeError):
            made(override)


def test_overrides_set_nested_keys_and_the_last_one_wins() -> None:
    recipe = made("optimizer.options.lr=1", "optimizer.options.lr=2", "model.freeze=[a.*, b]")
    assert recipe.optimizer.options == {"lr": 2}
    assert recipe.model.freeze == ("a.*", "b")
    assert made("optimizer.options={lr: 3}", "optimizer.options.momentum=0.5").optimizer.options == {
        "lr": 3,
        "momentum": 0.5,
    }


def test_missing_key_is_reported() -> None:
    data = raw()
    del data["optimizer"]
    with pytest.raises(RecipeError, match="optimizer is missing"):
        make_recipe(data, (), origin="a test")
    with pytest.raises(RecipeError, match=r"data\.name is missing"):
        made(data={"options": {}})


leaves = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=8)
options = st.dictionaries(
    st.text(max_size=6), st.recursive(leaves, lambda inner: st.lists(inner, max_size=3), max_leaves=5)
)


@settings(max_examples=40)
@given(options=options, freeze=st.lists(st.text(max_size=5), max_size=3), rate=st.floats(0, 1), seed=st.integers(0))
def test_written_recipe_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any], freeze: list[str], rate: float, seed: int
) -> None:
    step = {"seed": seed % 2**63, "clip_norm": rate or None}
    recipe = made(
        data={"name": "d", "options": options},
        model={"name": "m", "freeze": freeze},
        schedule={"final": rate},
        step=step,
    )
    path = tmp_path_factory.getbasetemp() / "recipe.yaml"
    write_recipe(recipe, path)
    assert read_recipe(path) == recipe
    assert not differences(recipe_data(recipe), recipe_data(read_recipe(path)))


def test_differences_have_one_line_per_key() -> None:
    old = recipe_data(made("data.options.gone=1", "data.options.kept=1"))
    new = recipe_data(made("data.options.kept=1", "data.options.come={a: 1}", "epochs=3", "step.clip_norm=0.5"))
    assert differences(old, old) == []
    assert sorted(differences(old, new)) == [
        'data.options.come: (not set) -> {"a": 1}',
        "data.options.gone: 1 -> (not set)",
        "epochs: 1 -> 3",
        "step.clip_norm: null -> 0.5",
    ]


def test_repeated_key_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.yaml"
    path.write_text("step: {seed: 1}\nbatch_size: 8\nstep: {clip_norm: 1.0}\n", encoding="utf-8")
    with pytest.raises(RecipeError, match="the key 'step' occurs twice"):
        read_recipe(path)


# --- values that errors suggest ---


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


# --- short keys and paths ---


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
