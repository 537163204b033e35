"""Overrides `key=value` of a recipe: ends of keys, and paths; the JSON schema."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import Field, fields
from typing import Any

from samestep.config import Recipe
from samestep.config.key_suggestions import SYNONYMS
from samestep.config.validation import section_of
from samestep.distributed.env import expand_path
from samestep.errors import RecipeError

# Keys whose values are paths, in which `~` and `$VAR` are expanded.
_PATHS = (
    *("data.options.path", "data.options.evaluation_path", "data.options.image_root"),
    *("data.options.tokenizer", "model.pretrained"),
)
_WORD = re.compile(r"[A-Za-z_][\w./-]*(:[\w./-]+)*")
_CONSTANTS = ("true", "false", "null", "yes", "no", "on", "off", "y", "n")
_ATTRIBUTE = re.compile(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", re.MULTILINE)  # of a docstring


def apply_setting(data: dict[str, Any], setting: str) -> tuple[str, str]:
    """Set a key of plain data, and return the full key and the text of the value.

    Raises:
        RecipeError: the setting is not `key=value`, the value is not YAML, or the key is unclear.
    """
    from samestep.recipes.yaml_text import YAMLError, from_yaml  # a package of the extra `recipes`

    short, equals, text = setting.partition("=")
    if not equals or not short:
        raise RecipeError(f"setting {setting!r}", expected="key=value", fix="batch_size=64")
    key = full_key(data, short, text)
    try:
        value = from_yaml(text)
    except YAMLError as error:
        raise RecipeError(
            f"{setting!r}: {error}",
            expected="a YAML value",
            fix=shlex.quote(f"{short}={json.dumps(text)}"),
            code="E_VALUE",
        ) from error
    *parents, leaf = key.split(".")
    mapping = data
    for parent in parents:
        child = mapping.setdefault(parent, {})
        if not isinstance(child, dict):
            raise RecipeError(
                f"{setting!r}: {parent} is {json.dumps(child)}, which has no keys",
                expected="a mapping as each parent of the key",
                fix=f"{parent}=value",
                code="E_UNKNOWN_KEY",
            )
        mapping = child
    mapping[leaf] = value
    return key, text


def full_key(data: Mapping[str, Any], key: str, text: str = "VALUE") -> str:
    """Return the full key of a key that may be short, such as `lr`; an unknown one as it is.

    Raises:
        RecipeError: several keys end in the short one.
    """
    # Full already: options of components are keys that no class lists.
    if key.partition(".")[0] in names_of(Recipe):
        return key
    own = (name for name, _, _ in keys_of(Recipe))
    known = {*own, *flat(data), *SYNONYMS.values()}
    full = sorted(name for name in known if name.endswith(f".{key}"))
    if len(full) > 1:
        raise RecipeError(
            f"{key} is the end of {len(full)} keys",
            expected="a key, or the end of one key only",
            fix=" or ".join(f"{name}={text}" for name in full),
            code="E_UNKNOWN_KEY",
        )
    return next(iter(full), key)


def value_text(value: Any) -> str:
    """Return a value as YAML, a word without quotes."""
    if isinstance(value, list):
        return f"[{', '.join(map(value_text, value))}]"
    if isinstance(value, str) and _WORD.fullmatch(value) and value.lower() not in _CONSTANTS:
        return value
    return json.dumps(value, ensure_ascii=False)


def expand_paths(data: Mapping[str, Any]) -> None:
    """Replace `~` and `$VAR` in the paths of a recipe in plain data."""
    for key in _PATHS:
        *parents, leaf = key.split(".")
        section: Any = value_at(data, parents)
        if isinstance(section, dict) and isinstance(section.get(leaf), str):
            section[leaf] = expand_path(section[leaf])


def flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of nested mappings by dotted keys."""
    values: dict[str, Any] = {}
    for name, value in data.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            values |= flat(value, f"{key}.")
        else:
            values[key] = value
    return values


def value_at(data: Mapping[str, Any], path: Iterable[str]) -> Any:
    """Return the value at a path of names, or None."""
    value: Any = data
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


# --- keys ---


def names_of(kind: Any) -> list[str]:
    """Return the names of the keys of a configuration class."""
    return [key.name for key in fields(kind)]


def keys_of(kind: Any, prefix: str = "") -> Iterator[tuple[str, Field[Any], Any]]:
    """Yield dotted key, field and section class (None for a value) of a class and its sections."""
    for entry in fields(kind):
        section = section_of(kind, entry.name)
        yield f"{prefix}{entry.name}", entry, section
        if section is not None:
            yield from keys_of(section, f"{prefix}{entry.name}.")


# --- schema -------------------------------------------------------------------------------------


def descriptions(kind: type) -> dict[str, str]:
    """Return the descriptions of the fields of a class by name, from docstrings."""
    # Base classes first: the text of a class replaces theirs.
    documents = [base.__dict__.get("__doc__") or "" for base in reversed(kind.__mro__)]
    matches = [match for document in documents for match in _ATTRIBUTE.findall(document)]
    return {name: " ".join(text.split()) for name, text in matches}


def recipe_schema() -> str:
    """Return the JSON schema of a recipe."""
    from pydantic import TypeAdapter  # slow, and commands mostly print no schema

    schema = TypeAdapter(Recipe).json_schema()
    sections = [section for _, _, section in keys_of(Recipe) if section is not None]
    kinds = {kind.__name__: kind for kind in (Recipe, *sections)}
    for name, section in [("Recipe", schema), *schema["$defs"].items()]:
        texts = descriptions(kinds[name])
        section["description"] = (kinds[name].__doc__ or "").partition("\n")[0]
        for key, value in section["properties"].items():
            value.pop("title", None)  # the name of the key once more
            if key in texts:
                value["description"] = texts[key]
    text = json.dumps(
        {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}, indent=1
    )
    return f"{text}\n"
