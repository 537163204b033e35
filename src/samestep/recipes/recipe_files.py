"""Recipes as YAML files, with overrides and validation; facts of datasets in the run directory.

A recipe that cannot be read or is invalid raises `RecipeError`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_type_hints

import yaml
from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from samestep.config import NamedConfig, Recipe
from samestep.errors import InputError, RecipeError

_MISSING = object()
_DATASET_FILE = "data.json"
# An unknown key this similar to a valid one is a typo rather than an option without `options`.
_TYPO = 0.8


class _Loader(yaml.SafeLoader):
    """YAML 1.1 loader that reads `1e-3` as a number."""


class _Dumper(yaml.SafeDumper):
    """YAML dumper that quotes the text `1e-3`."""


_SCIENTIFIC = re.compile(r"^[-+]?(\d[\d_]*(\.[\d_]*)?|\.\d[\d_]*)[eE][-+]?\d+$")
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _SCIENTIFIC, list("-+0123456789."))


def shipped_recipes() -> dict[str, Path]:
    """Return the files of the shipped recipes by name."""
    return {path.stem: path for path in sorted((Path(__file__).parent / "shipped").glob("*.yaml"))}


def load_recipe(name: str, overrides: Sequence[str] = ()) -> Recipe:
    """Return a shipped recipe or the recipe of a YAML file, with `key=value` overrides."""
    return make_recipe(read_yaml(_find(name)), overrides, origin=name)


def make_recipe(raw: Mapping[str, Any], overrides: Sequence[str], *, origin: str) -> Recipe:
    """Return the validated recipe of plain data with `key=value` overrides; `origin` names the recipe in errors."""
    try:
        data = json.loads(json.dumps(raw))
    except TypeError as error:
        expected = "numbers, text, true/false, null, lists and mappings"
        raise RecipeError(f"{origin}: {error}", expected=expected, fix="quote the value", code="E_VALUE") from error
    for override in overrides:
        _override(data, override)
    _refuse_misleading_keys(data, origin)
    try:
        # Strict validation of JSON accepts lists for tuples, but no other conversions.
        return TypeAdapter(Recipe).validate_json(json.dumps(data), strict=True)
    except ValidationError as error:
        raise _explain(error.errors()[0], origin) from error


def recipe_data(recipe: Recipe) -> dict[str, Any]:
    """Return the resolved recipe as plain data, with all defaults."""
    data: dict[str, Any] = json.loads(json.dumps(asdict(recipe)))
    return data


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Write the resolved recipe to a file that `read_recipe` reads."""
    path.write_text(yaml.dump(recipe_data(recipe), Dumper=_Dumper, sort_keys=False), encoding="utf-8")


def read_recipe(path: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Return the recipe of a file, with `key=value` overrides."""
    return make_recipe(read_yaml(path), overrides, origin=str(path))


def differences(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the differences of two recipes in plain data, one line per key."""
    lines = []
    for key in [*old, *(key for key in new if key not in old)]:
        before, after = old.get(key, _MISSING), new.get(key, _MISSING)
        if isinstance(before, Mapping) and isinstance(after, Mapping):
            lines += differences(before, after, f"{prefix}{key}.")
        elif before != after:
            texts = ["(not set)" if value is _MISSING else json.dumps(value) for value in (before, after)]
            lines.append(f"{prefix}{key}: {' -> '.join(texts)}")
    return lines


def read_yaml(path: Path) -> Mapping[str, Any]:
    """Return the mapping of a YAML file."""
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem, fix = f"{path} cannot be read: {error}", "correct the line of the error"
        raise RecipeError(problem, expected="YAML in UTF-8", fix=fix, code="E_UNREADABLE") from error
    if not isinstance(raw, Mapping):
        raise RecipeError(f"{path} contains a {type(raw).__name__}", expected="a mapping", fix="write key: value lines")
    return raw


def _find(name: str) -> Path:
    shipped = shipped_recipes()
    if name in shipped:
        return shipped[name]
    path = Path(name)
    if path.suffix not in (".yaml", ".yml"):
        close = get_close_matches(name, shipped, n=1)
        raise RecipeError(
            f"there is no recipe {name!r}",
            expected=f"one of {', '.join(shipped)}, or a file that ends in .yaml",
            fix=f"did you mean {close[0]}?" if close else f"samestep train {next(iter(shipped))}",
            code="E_UNKNOWN_NAME",
        )
    if not path.is_file():
        problem = f"there is no file {name}"
        raise RecipeError(problem, expected="a YAML file", fix="correct the path", code="E_FILE_MISSING")
    return path


def _override(data: dict[str, Any], override: str) -> None:
    """Set one `key=value` override in plain data."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RecipeError(f"--set {override!r}", expected="--set key=value", fix="--set batch_size=64")
    try:
        value = yaml.load(text, Loader=_Loader)
    except yaml.YAMLError as error:
        raise RecipeError(
            f"--set {override!r}: {error}", expected="a YAML value", fix="quote the value", code="E_VALUE"
        ) from error
    *parents, leaf = key.split(".")
    mapping = data
    for parent in parents:
        child = mapping.setdefault(parent, {})
        if not isinstance(child, dict):
            raise RecipeError(
                f"--set {override!r}: {parent} is {json.dumps(child)}, which has no keys",
                expected="a mapping as each parent of the key",
                fix=f"--set {parent}=value",
                code="E_UNKNOWN_KEY",
            )
        mapping = child
    mapping[leaf] = value


def _refuse_misleading_keys(data: Mapping[str, Any], origin: str) -> None:
    """Refuse keys of other tools whose most similar valid key has another meaning."""
    if "per_device_batch_size" in data:
        size = json.dumps(data["per_device_batch_size"])
        raise RecipeError(
            f"{origin}: per_device_batch_size is {size}",
            expected="batch_size, the number of samples per step on all devices together",
            fix=f"batch_size: {size} times the number of devices, or samestep train ... --per-device-batch-size {size} "
            "--processes N",
            code="E_UNKNOWN_KEY",
        )
    rate = data.get("learning_rate")
    if isinstance(rate, int | float):
        raise RecipeError(
            f"{origin}: learning_rate is {json.dumps(rate)}",
            expected="a rule that scales lr with batch_size: {rule: linear, base_batch_size: 256}",
            fix=f"--set optimizer.options.lr={rate}",
            code="E_VALUE",
        )


def _explain(error: ErrorDetails, origin: str) -> RecipeError:
    path = [str(part) for part in error["loc"]]
    key = ".".join(path)
    if error["type"] == "unexpected_keyword_argument":
        kind: Any = Recipe
        for part in path[:-1]:
            kind = get_type_hints(kind)[part]
        keys = [field.name for field in fields(kind)] if is_dataclass(kind) else []
        suggestion = _suggestion(path, keys)
        problem, expected, code = f"unknown key {key}", f"one of the keys {', '.join(keys)}", "E_UNKNOWN_KEY"
        fix = f"did you mean {suggestion}?" if suggestion else f"remove {key}"
    elif error["type"] in ("missing", "missing_argument"):
        problem, expected, code = f"{key} is missing", "a value; this key has no default", "E_MISSING_KEY"
        fix = f"add {path[-1]}: to the recipe, or --set {key}=VALUE"
    else:
        problem, code = f"{key} is {json.dumps(error['input'])}", "E_VALUE"
        expected = error["msg"].removeprefix("Input should be ")
        fix = f"--set {key}=..., or correct the file"
    return RecipeError(f"{origin}: {problem}", expected=expected, fix=fix, code=code)


def _suggestion(path: Sequence[str], keys: Sequence[str]) -> str | None:
    """Return the valid key for an unknown one: a similar key, or `data.options.path` for `data.path`."""
    *parents, name = path
    close = get_close_matches(name, keys, n=1, cutoff=0.5)
    kind = get_type_hints(Recipe).get(parents[0]) if len(parents) == 1 else None
    has_options = isinstance(kind, type) and issubclass(kind, NamedConfig)
    if has_options and not get_close_matches(name, keys, n=1, cutoff=_TYPO):
        return f"{parents[0]}.options.{name}"
    return ".".join([*parents, close[0]]) if close else None


@dataclass(frozen=True)
class DatasetInfo:
    """Facts of a dataset that a trained model needs."""

    classes: Sequence[str]  # class names by number
    model_options: Mapping[str, Any] = field(default_factory=dict)  # model options that follow from the data


def write_dataset_info(info: DatasetInfo, run: Path) -> None:
    """Write the facts to a run directory."""
    (run / _DATASET_FILE).write_text(json.dumps(asdict(info), indent=1), encoding="utf-8")


def read_dataset_info(run: Path) -> DatasetInfo:
    """Return the facts of a run directory; raise `InputError` if the file is missing or damaged."""
    path = run / _DATASET_FILE
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        return DatasetInfo(tuple(data["classes"]), dict(data["model_options"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} cannot be read: {error}",
            expected="the class names and model options of the run",
            fix="run samestep resume RUN with access to the data, which writes the file",
            code="E_UNREADABLE",
        ) from error
