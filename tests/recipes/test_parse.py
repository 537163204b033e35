"""Recipes as YAML: found, read, overridden, checked and written."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from samestep.config import Part, Recipe
from samestep.errors import RecipeError
from samestep.recipes.parse import (
    differences,
    load_recipe,
    make_recipe,
    read_recipe,
    recipe_data,
    shipped_recipes,
    write_recipe,
)


def raw(**more: Any) -> dict[str, Any]:
    """The least that a recipe can say."""
    least = {"data": {"name": "d"}, "model": {"name": "m"}, "optimizer": {"name": "o"}, "batch_size": 8, "epochs": 1}
    return {**least, **more}


def made(*overrides: str, **more: Any) -> Recipe:
    return make_recipe(raw(**more), overrides, origin="a test")


def test_shipped_recipes_load_as_they_stand() -> None:
    assert set(shipped_recipes()) >= {"digits", "images", "tokens"}
    for name in shipped_recipes():
        assert load_recipe(name).step.reduction == "exact"


def test_defaults_are_filled_in() -> None:
    recipe = made()
    assert recipe.loss == Part(name="cross_entropy")
    assert (recipe.shards, recipe.metrics, recipe.schedule.name) == (8, ("accuracy",), "constant")


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
    ],
)
def test_values_of_overrides_are_yaml_as_people_write_it(override: str, value: Any) -> None:
    found = made(f"data.options.x={override}").data.options["x"]
    assert found == value
    assert type(found) is type(value)


def test_a_whole_number_does_where_a_fraction_is_meant_but_not_the_other_way_round() -> None:
    assert made("schedule.warmup_epochs=2").schedule.warmup_epochs == 2.0
    assert made("step.clip_norm=1").step.clip_norm == 1.0
    for override in ("epochs=2.0", "epochs=1e1", "batch_size=true", "step.clip_norm='1'"):
        with pytest.raises(RecipeError):
            made(override)


def test_overrides_reach_inside_and_later_ones_win() -> None:
    recipe = made("optimizer.options.lr=1", "optimizer.options.lr=2", "model.freeze=[a.*, b]")
    assert recipe.optimizer.options == {"lr": 2}
    assert recipe.model.freeze == ("a.*", "b")
    assert made("optimizer.options={lr: 3}", "optimizer.options.momentum=0.5").optimizer.options == {
        "lr": 3,
        "momentum": 0.5,
    }


def test_overrides_do_not_change_what_they_are_applied_to() -> None:
    given_before = raw(data={"name": "d", "options": {"x": 1}})
    make_recipe(given_before, ("data.options.x=2",), origin="a test")
    assert given_before["data"] == {"name": "d", "options": {"x": 1}}


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ({"epoch": 1}, "epochs"),
        ({"schedule": {"warmup": 1}}, "schedule.warmup_epochs"),
        ({"step": {"reductoin": "fast"}}, "step.reduction"),
        ({"model": {"name": "m", "pretrain": "x"}}, "model.pretrained"),
    ],
)
def test_unknown_key_names_the_nearest_and_all(given: dict[str, Any], nearest: str) -> None:
    with pytest.raises(RecipeError) as error:
        made(**given)
    assert error.value.do == f"did you mean {nearest}?"
    assert nearest.rpartition(".")[2] in str(error.value.rule)


@pytest.mark.parametrize("part", ["data", "model", "loss", "optimizer"])
@pytest.mark.parametrize("value", [3, 0.5, "text", [1, 2], None, True])
def test_options_can_be_said_without_the_word(part: str, value: Any) -> None:
    of_file = made(**{part: {"name": "n", "width": value, "options": {"depth": 2}}})
    assert getattr(of_file, part).options == {"depth": 2, "width": value}
    assert made(**{part: {"name": "n", "width": value}}) == made(**{part: {"name": "n", "options": {"width": value}}})
    text = yaml.safe_dump(value, default_flow_style=True).removesuffix("...\n").strip()
    assert made(f"{part}.name=n", f"{part}.width={text}") == made(f"{part}.name=n", f"{part}.options.width={text}")


def test_short_and_full_options_are_one_and_the_later_wins() -> None:
    assert made("data.path=a", "data.options.path=b").data.options == {"path": "b"}
    assert made("data.options.path=a", "data.path=b").data.options == {"path": "b"}
    assert made("data.path=b", data={"name": "d", "path": "a"}).data.options == {"path": "b"}
    with pytest.raises(RecipeError, match=r"data\.path and data\.options\.path are both given"):
        made(data={"name": "d", "path": "a", "options": {"path": "a"}})


def test_a_parts_own_keys_and_mappings_are_no_options() -> None:
    assert made("model.freeze=[a.*]").model.options == {}
    assert made("optimizer.layer_decay=0.5").optimizer.options == {}
    for override in ("model.opts={width: 8}", "model.opts.width=8", "model.width={}"):
        with pytest.raises(RecipeError, match="unknown key model"):
            made(override)


@pytest.mark.parametrize(
    "slip", ["model.pretraind=a", "model.freez=[a]", "optimizer.layer_decy=1", "data.bad_sample=x"]
)
def test_a_slip_of_a_parts_own_key_is_no_option(slip: str) -> None:
    key, _, _ = slip.partition("=")
    part, _, name = key.partition(".")
    with pytest.raises(RecipeError, match=f"unknown key {key}") as error:
        made(slip)
    assert f"did you mean {part}." in str(error.value.do)
    assert f"{part}.options.{name}" in str(error.value.rule)
    assert name in getattr(made(f"{part}.options.{name}=1"), part).options


def test_options_that_are_none_are_refused_as_before() -> None:
    with pytest.raises(RecipeError, match="options is 3, which has no keys"):
        made("data.options=3", "data.path=a")
    with pytest.raises(RecipeError, match=r"data\.options is 3"):
        made(data={"name": "d", "options": 3})


def test_missing_key_is_named() -> None:
    given = raw()
    del given["optimizer"]
    with pytest.raises(RecipeError, match="optimizer is not given"):
        make_recipe(given, (), origin="a test")
    with pytest.raises(RecipeError, match=r"data\.name is not given"):
        made(data={"options": {}})


leaves = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=8)
options = st.dictionaries(
    st.text(max_size=6), st.recursive(leaves, lambda inner: st.lists(inner, max_size=3), max_leaves=5)
)


@settings(max_examples=40)
@given(options=options, freeze=st.lists(st.text(max_size=5), max_size=3), rate=st.floats(0, 1), seed=st.integers(0))
def test_reading_a_written_recipe_gives_the_same(
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


def test_written_recipe_has_every_key(tmp_path: Path) -> None:
    write_recipe(made(), tmp_path / "recipe.yaml")
    text = (tmp_path / "recipe.yaml").read_text(encoding="utf-8")
    for key in recipe_data(made())["step"]:
        assert f"  {key}: " in text


def test_differences_name_each_leaf() -> None:
    old = recipe_data(made("data.options.gone=1", "data.options.kept=1"))
    new = recipe_data(made("data.options.kept=1", "data.options.come={a: 1}", "epochs=3", "step.clip_norm=0.5"))
    assert differences(old, old) == []
    assert sorted(differences(old, new)) == [
        'data.options.come: (not there) -> {"a": 1}',
        "data.options.gone: 1 -> (not there)",
        "epochs: 1 -> 3",
        "step.clip_norm: null -> 0.5",
    ]


def test_differences_tell_a_number_from_its_text_and_a_missing_key_from_null() -> None:
    assert differences({"a": 1}, {"a": "1"}) == ['a: 1 -> "1"']
    assert differences({"a": None}, {}) == ["a: null -> (not there)"]
    assert differences({}, {"a": None}) == ["a: (not there) -> null"]


def test_recipes_are_plain_data_that_does_not_change() -> None:
    recipe = made()
    with pytest.raises(AttributeError):
        recipe.epochs = 2  # type: ignore[misc]
    assert replace(recipe, epochs=2) != recipe
