"""Errors of unknown keys and invalid values of a recipe, with the key or value that was probably meant."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from typing import Any, get_args, get_type_hints

from pydantic_core import ErrorDetails

from samestep.config import NamedConfig, Recipe
from samestep.config.key_suggestions import Equivalent, find_equivalent
from samestep.errors import RecipeError

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


def explain(errors: Sequence[ErrorDetails], data: Mapping[str, Any], origin: str) -> RecipeError:
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
