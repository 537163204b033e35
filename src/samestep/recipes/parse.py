"""Recipes as YAML: found, read, overridden, checked and written."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from samestep.config import Recipe
from samestep.errors import RecipeError
from samestep.recipes.short_keys import full_key, own_option, with_options


class _Yaml(yaml.SafeLoader):
    """YAML as people write it: PyYAML follows YAML 1.1, in which `1e-3` is a string."""


_Yaml.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+0123456789."),
)


def shipped_recipes() -> dict[str, Path]:
    """The recipes that come with Samestep, by name."""
    folder = Path(str(files("samestep.recipes") / "shipped"))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a shipped name or a YAML file, with `key=value` overrides applied.

    Raises:
        RecipeError: there is no such recipe, or something in it is wrong.
    """
    return make_recipe(read_yaml(_find(name)), overrides, origin=name)


def make_recipe(raw: Mapping[str, Any], overrides: Sequence[str], *, origin: str) -> Recipe:
    """A checked recipe from plain data; `origin` is what errors call it."""
    data = with_options(json.loads(_as_json(raw, origin)), origin)
    for override in overrides:
        _override(data, override)
    _refuse_what_is_meant_otherwise(data, origin)
    try:
        # Through JSON, because strict checks of it take lists for tuples and nothing else for anything else.
        return TypeAdapter(Recipe).validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise _explain(error.errors()[0], origin) from error


def recipe_data(recipe: Recipe) -> dict[str, Any]:
    """The resolved recipe as plain data, every default filled in."""
    data: dict[str, Any] = json.loads(json.dumps(asdict(recipe)))
    return data


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Write the resolved recipe; reading it gives the same recipe."""
    path.write_text(yaml.safe_dump(recipe_data(recipe), sort_keys=False), encoding="utf-8")


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe from a file that `write_recipe` wrote."""
    return make_recipe(read_yaml(path), overrides, origin=str(path))


_ABSENT = object()


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """What differs between two recipes' plain data, one line a leaf."""
    lines = []
    for key in [*old, *(key for key in new if key not in old)]:
        before, after = old.get(key, _ABSENT), new.get(key, _ABSENT)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            lines.append(f"{prefix}{key}: {_shown(old, key)} -> {_shown(new, key)}")
    return lines


def _shown(data: Mapping[str, Any], key: str) -> str:
    return json.dumps(data[key]) if key in data else "(not there)"


def _find(name: str) -> Path:
    shipped = shipped_recipes()
    if name in shipped:
        return shipped[name]
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        close = get_close_matches(name, shipped, n=1)
        raise RecipeError(
            f"there is no recipe {name!r}",
            rule=f"one of {', '.join(shipped)}, or a file that ends in .yaml",
            do=f"did you mean {close[0]}?" if close else f"samestep train {next(iter(shipped))}",
        )
    if not path.is_file():
        raise RecipeError(f"there is no file {name}", rule="a recipe is a YAML file", do="look at the path")
    return path


def read_yaml(path: Path) -> Mapping[str, Any]:
    """What a YAML file holds.

    Raises:
        RecipeError: it cannot be read, or holds no mapping.
    """
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), Loader=_Yaml)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise RecipeError(
            f"{path} cannot be read: {error}", rule="YAML, in UTF-8", do="mend the place that is named"
        ) from error
    if not isinstance(raw, Mapping):
        raise RecipeError(f"{path} holds a {type(raw).__name__}", rule="a recipe is a mapping", do="key: value lines")
    return raw


def _as_json(raw: Mapping[str, Any], origin: str) -> str:
    try:
        return json.dumps(raw)
    except TypeError as error:
        raise RecipeError(
            f"{origin}: {error}", rule="numbers, text, true/false, null, lists and mappings", do="quote it"
        ) from error


def _override(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RecipeError(f"--set {override!r}", rule="--set key=value", do="--set batch_size=64")
    try:
        value = yaml.load(text, Loader=_Yaml)
    except yaml.YAMLError as error:
        raise RecipeError(f"--set {override!r}: {error}", rule="values are YAML", do="quote the value") from error
    *parents, leaf = full_key(key.split("."), value)
    place = data
    for parent in parents:
        inner = place.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise RecipeError(
                f"--set {override!r}: {parent} is {json.dumps(inner)}, which has no keys",
                rule="a.b=value needs a to be a mapping",
                do=f"--set {parent}=value",
            )
        place = inner
    place[leaf] = value


def _refuse_what_is_meant_otherwise(data: Mapping[str, Any], origin: str) -> None:
    """Keys that people know from elsewhere, where the nearest valid one would lead them astray."""
    if "per_device_batch_size" in data:
        size = json.dumps(data["per_device_batch_size"])
        raise RecipeError(
            f"{origin}: per_device_batch_size is {size}",
            rule="a recipe knows no devices: batch_size counts the samples of all of them together",
            do=f"batch_size: {size} times the devices you mean, or samestep train ... --per-device-batch-size {size} "
            "--processes N",
        )
    rate = data.get("learning_rate")
    if isinstance(rate, int | float):
        raise RecipeError(
            f"{origin}: learning_rate is {json.dumps(rate)}",
            rule="learning_rate says how the optimizer's lr follows batch_size: {rule: linear, base_batch_size: 256}",
            do=f"--set optimizer.options.lr={rate}",
        )


def _explain(error: ErrorDetails, origin: str) -> RecipeError:
    where = [str(part) for part in error["loc"]]
    key = ".".join(where)
    if error["type"] == "unexpected_keyword_argument":
        known = _keys_at(where[:-1])
        close = get_close_matches(where[-1], known, n=1, cutoff=0.5)
        nearest = ".".join([*where[:-1], close[0]]) if close else None
        option = own_option(where)
        return RecipeError(
            f"{origin}: unknown key {key}",
            rule=f"keys here: {', '.join(known)}" + (f"; an option of that name is {option}" if option else ""),
            do=f"did you mean {nearest}?" if nearest else "remove it",
        )
    if error["type"] in ("missing", "missing_argument"):
        return RecipeError(
            f"{origin}: {key} is not given", rule="it has no default", do=f"add {where[-1]}: to the recipe, or --set"
        )
    return RecipeError(
        f"{origin}: {key} is {json.dumps(error['input'])}",
        rule=error["msg"].replace("Input should be", "it should be"),
        do=f"--set {key}=..., or correct the file",
    )


def _keys_at(where: Sequence[str]) -> list[str]:
    place: Any = Recipe
    for part in where:
        place = get_type_hints(place)[part]
    return [field.name for field in fields(place)] if is_dataclass(place) else []
