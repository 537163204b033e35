"""Recipes as YAML files, with overrides and validation; facts of datasets in the run directory.

A recipe that cannot be read or is invalid raises `RecipeError`. The error of an unknown key or an invalid value names
the key or value that was probably meant.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from samestep.checkpoint.contents import validator_of
from samestep.checkpoint.files import write_atomically
from samestep.config import NamedConfig, Recipe, StepConfig
from samestep.config.key_suggestions import Equivalent, find_equivalent
from samestep.errors import InputError, RecipeError
from samestep.units import format_bytes

_MISSING = object()
_DATASET_FILE = "data.json"
# An unknown key this similar to a valid one is a typo rather than an option without `options`.
_TYPO = 0.8
_OPTIONS = {
    "optimizer": ("lr", "momentum", "weight_decay", "betas", "eps", "nesterov", "dampening", "amsgrad"),
    "data": ("path", "evaluation_path", "evaluation_fraction", "image_size", "crop_fraction", "augment", "classes"),
    "loss": ("label_smoothing", "weight", "ignore_index"),
}
# Components whose options are those of user code: a word of another tool can be one of them.
_OPEN = ("model", "data")
_SECTIONS = {
    "dataset": "data",
    "datasets": "data",
    "net": "model",
    "network": "model",
    "backbone": "model",
    "criterion": "loss",
    "optim": "optimizer",
    "scheduler": "schedule",
    "lr_scheduler": "schedule",
    "lr_schedule": "schedule",
}
# Names that pydantic appends to the key of a value with alternative types.
_ALTERNATIVES = ("constrained-int", "literal['auto']")
# Expectations of pydantic in the terms of YAML.
_YAML_TERMS = {"a valid array": "a list", "an object": "a mapping", "less than inf": "a finite number"}
_TYPE_WORDS = ("type", "class", "class_path", "target", "_target_")
# Limits of a recipe file, in bytes and in values after aliases are replaced.
_MAX_BYTES, _MAX_VALUES = 1 << 20, 100_000


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
    if isinstance(step := data.get("step") if isinstance(data, dict) else None, dict):
        _restore_words(step)
    try:
        # Strict validation of JSON accepts lists for tuples, but no other conversions.
        recipe: Recipe = validator_of(Recipe).validate_json(json.dumps(data), strict=True)
        return recipe
    except ValidationError as error:
        raise _explained(error.errors(), data, origin) from error


def _restore_words(step: dict[str, Any]) -> None:
    """Replace the booleans as which YAML 1.1 reads `on` and `off`, in keys that have these values."""
    words = [name for name, hint in get_type_hints(StepConfig).items() if "off" in get_args(hint)]
    step |= {name: "on" if step[name] else "off" for name in words if isinstance(step.get(name), bool)}


def make_saved_recipe(raw: Mapping[str, Any], *, origin: str) -> Recipe:
    """Return the recipe of a run; one that was written before the key `data.order` has the order `shuffled`."""
    data = raw.get("data")
    if isinstance(data, Mapping):
        raw = {**raw, "data": {"order": "shuffled", **data}}
    return make_recipe(raw, (), origin=origin)


def recipe_data(recipe: Recipe) -> dict[str, Any]:
    """Return the resolved recipe as plain data, with all defaults."""
    data: dict[str, Any] = json.loads(json.dumps(asdict(recipe)))
    return data


def write_recipe(recipe: Recipe, path: Path) -> None:
    """Write the resolved recipe to a file that `read_recipe` reads."""
    from samestep.recipes.yaml_text import to_yaml  # a package of the extra `recipes`

    write_atomically(path, to_yaml(recipe_data(recipe)))


def read_recipe(path: Path) -> Recipe:
    """Return the recipe of a file that `write_recipe` has written.

    Raises:
        RecipeError: the file is damaged: it cannot be read, or has fewer keys than a resolved recipe.
    """
    raw = read_yaml(path)
    recipe = make_saved_recipe(raw, origin=str(path))
    missing = sorted(recipe_data(recipe).keys() - raw.keys())
    if missing:
        problem, fix = f"{path} has no {missing[0]}", "restore the file"
        raise RecipeError(problem, expected="a resolved recipe with all keys", fix=fix, code="E_UNREADABLE")
    return recipe


def update_recipe(path: Path, recipe: Recipe) -> None:
    """Write the epochs of `recipe` to the file of a run, for a later resumption; replace a damaged file."""
    try:
        saved = read_recipe(path)
    except RecipeError:
        saved = None
    if saved is None or saved.epochs != recipe.epochs:
        write_recipe(replace(saved or recipe, epochs=recipe.epochs), path)


def with_saved_weight(recipe: Recipe, saved: Recipe) -> Recipe:
    """Return the recipe with the foreground weight of a checkpoint in place of `from_masks`.

    The masks can have changed since the first step of the run, or be those of other data.
    """
    options, key = recipe.loss.options, "foreground_weight"
    if options.get(key) != "from_masks" or recipe.loss.name != saved.loss.name:
        return recipe
    weight = saved.loss.options.get(key, options[key])
    return replace(recipe, loss=replace(recipe.loss, options={**options, key: weight}))


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
    from samestep.recipes.yaml_text import YAMLError, from_yaml  # a package of the extra `recipes`

    try:
        _require_small(path)
        raw = from_yaml(path.read_text(encoding="utf-8"))
        _require_tree(raw, path)
    except (YAMLError, UnicodeDecodeError, RecursionError, OSError) as error:
        problem, fix = f"{path} cannot be read: {error}", "correct the line of the error"
        raise RecipeError(problem, expected="YAML in UTF-8", fix=fix, code="E_UNREADABLE") from error
    if not isinstance(raw, Mapping):
        raise RecipeError(f"{path} contains a {type(raw).__name__}", expected="a mapping", fix="write key: value lines")
    return raw


def _require_small(path: Path) -> None:
    size = path.stat().st_size
    if size > _MAX_BYTES:
        expected = f"at most {format_bytes(_MAX_BYTES)}"
        raise RecipeError(f"{path} has {format_bytes(size)}", expected, "name a recipe", code="E_UNREADABLE")


def _require_tree(raw: Any, path: Path) -> None:
    """Require a bounded number of values: aliases of YAML can repeat a value endlessly."""
    pending, count = [raw], 0
    while pending:
        value = pending.pop()
        count += 1
        if isinstance(value, dict | list):
            pending += value.values() if isinstance(value, dict) else value
        if count > _MAX_VALUES or len(pending) > _MAX_VALUES:
            raise RecipeError(
                f"{path} has more than {_MAX_VALUES:,} values",
                expected="fewer values, without an alias (*name) inside of the value that it repeats",
                fix="replace the aliases by values",
                code="E_UNREADABLE",
            )


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
        problem = f"{name} is not a file" if path.exists() else f"there is no file {name}"
        raise RecipeError(problem, expected="a YAML file", fix="correct the path", code="E_FILE_MISSING")
    return path


def _override(data: dict[str, Any], override: str) -> None:
    """Set one `key=value` override in plain data."""
    from samestep.recipes.yaml_text import YAMLError, from_yaml  # a package of the extra `recipes`

    key, equals, text = override.partition("=")
    if not equals or not key:
        raise RecipeError(f"--set {override!r}", expected="--set key=value", fix="--set batch_size=64")
    try:
        value = from_yaml(text)
    except YAMLError as error:
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


# --- errors of keys and values ---


def _explained(errors: Sequence[ErrorDetails], data: Mapping[str, Any], origin: str) -> RecipeError:
    """Return the error of a recipe that is not valid; `origin` names the recipe.

    An unknown key comes first: a required key may be missing because it has another name.
    """
    unknown = [error for error in errors if error["type"] == "unexpected_keyword_argument"]
    error = (unknown or errors)[0]
    path = [str(part) for part in error["loc"] if part not in _ALTERNATIVES]
    key = ".".join(path)
    if unknown:
        path, value = _first_leaf(path, error["input"])
        suggestion, keys = _suggest(path, value, data), _keys(path[:-1]) or _keys([])
        problem, expected, code = f"unknown key {'.'.join(path)}", f"one of the keys {', '.join(keys)}", "E_UNKNOWN_KEY"
        fix = suggestion.suggestion() if suggestion is not None else f"remove {'.'.join(path)}"
    elif error["type"] in ("missing", "missing_argument"):
        problem, expected, code = f"{key} is missing", "a value; this key has no default", "E_MISSING_KEY"
        fix = f"add {path[-1]}: to the recipe, or --set {key}=VALUE"
    else:
        problem, code = f"{key} is {json.dumps(error['input'])}", "E_VALUE"
        terms = [other["msg"].removeprefix("Input should be ") for other in errors if _is_same(other, error)]
        expected = " or ".join(_YAML_TERMS.get(term, term) for term in terms)
        word = "scheduler" if key == "schedule.name" else path[-1]
        meant = find_equivalent(word, error["input"], data)
        fix = f"--set {key}=..., or correct the file"
        is_other = meant is not None and (meant.key, repr(meant.value)) != (key, repr(error["input"]))
        if meant is not None and is_other and (len(path) == 1 or meant.key == key):
            fix = meant.suggestion(key)
    return RecipeError(f"{origin}: {problem}", expected=expected, fix=fix, code=code)


def _is_same(other: ErrorDetails, error: ErrorDetails) -> bool:
    """Return whether two errors are those of the alternatives of one value."""
    return other is error or (other["loc"][:-1] == error["loc"][:-1] and other["loc"][-1] in _ALTERNATIVES)


def _first_leaf(path: Sequence[str], value: Any) -> tuple[list[str], Any]:
    """Return the path and value of the first key below an unknown section of the recipe."""
    leaf = list(path)
    while (
        isinstance(value, Mapping)
        and value
        and (leaf[-1] in _SECTIONS or not get_close_matches(leaf[-1], _keys(leaf[:-1]), cutoff=_TYPO))
    ):
        name, value = next(iter(value.items()))
        leaf.append(str(name))
    return leaf, value


def _suggest(path: Sequence[str], value: Any, data: Mapping[str, Any]) -> Equivalent | None:
    """Return the key or option that an unknown key of a recipe probably means."""
    section, name = list(path[:-1]), path[-1]
    if section and not _keys(section):
        # The section is unknown. Its name can be that of another tool, or only a heading such as `train`.
        section = [*filter(None, [_SECTIONS.get(section[0])]), *section[1:-1]]
        section = section if _keys(section) else []
    return next(_suggestions(section, name, value, data), None)


def _suggestions(section: list[str], name: str, value: Any, data: Mapping[str, Any]) -> Iterator[Equivalent]:
    """Yield candidates, the most probable one first."""

    def here(key: str) -> Equivalent:
        return Equivalent(".".join([*section, key]), value)

    keys = _keys(section)
    component = section[0] if len(section) == 1 and _has_options(section[0]) else None
    if name in (*_TYPE_WORDS, "name") and "name" in keys:
        # The names of optimizers and schedules differ in case and spelling.
        word = {"schedule": "scheduler", "optimizer": "optimizer"}.get(section[0])
        yield (find_equivalent(word, value) if word else None) or here("name")
    if name in keys:
        yield here(name)
    meant = find_equivalent(name, value, data, is_exact=True) if len(name) > 1 else None
    if meant is not None and _fits(meant, component):
        yield meant
    yield from map(here, get_close_matches(name, keys, n=1, cutoff=_TYPO))
    if component is not None:
        similar = get_close_matches(name, _OPTIONS.get(component, ()), n=1, cutoff=_TYPO)
        yield here(f"options.{similar[0] if similar else name}")
    by_name: dict[str, list[str]] = {}
    for key in _all_keys():
        by_name.setdefault(key.rpartition(".")[2], []).append(key)
    unique = {last: full[0] for last, full in by_name.items() if len(full) == 1}
    if name in unique:
        yield Equivalent(unique[name], value)
    if (meant := find_equivalent(name, value, data)) is not None:
        yield meant
    yield from (Equivalent(unique[last], value) for last in get_close_matches(name, unique, n=1, cutoff=_TYPO))
    yield from map(here, get_close_matches(name, keys, n=1, cutoff=0.5))


def _fits(meant: Equivalent, component: str | None) -> bool:
    """Whether an equivalent can be meant by a key of a component; for other sections, always."""
    if component not in _OPEN:
        return True
    if not meant.key:
        return component == "data"
    return not meant.is_recipe_key or "." not in meant.key or meant.key.startswith(f"{component}.")


def _kind(path: Sequence[str]) -> Any:
    """Return the class of a section of the recipe; None if there is no such section."""
    kind: Any = Recipe
    for part in path:
        hint = get_type_hints(kind).get(part) if is_dataclass(kind) else None
        kind = next((option for option in (hint, *get_args(hint)) if is_dataclass(option)), None)
    return kind


def _keys(path: Sequence[str]) -> list[str]:
    kind = _kind(path)
    return [field.name for field in fields(kind)] if kind is not None else []


def _has_options(section: str) -> bool:
    kind = _kind([section])
    return isinstance(kind, type) and issubclass(kind, NamedConfig)


def _all_keys(path: Sequence[str] = ()) -> Iterator[str]:
    for name in _keys(path):
        if _keys([*path, name]):
            yield from _all_keys([*path, name])
        else:
            yield ".".join([*path, name])


# --- facts of datasets ---


@dataclass(frozen=True)
class DatasetInfo:
    """Facts of a dataset that a trained model needs."""

    classes: Sequence[str]  # class names by number
    model_options: Mapping[str, Any] = field(default_factory=dict)  # model options that follow from the data


def write_dataset_info(info: DatasetInfo, run: Path) -> None:
    """Write the facts to a run directory."""
    write_atomically(run / _DATASET_FILE, json.dumps(asdict(info), indent=1))


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
