"""Errors of recipe keys and values: the key or the value that was probably meant, and the fix."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING
from difflib import get_close_matches
from typing import Any

from pydantic_core import ErrorDetails

from samestep.config import Recipe
from samestep.config.key_suggestions import SYNONYMS, suggest
from samestep.config.validation import section_of
from samestep.errors import RecipeError
from samestep.recipes.overrides import (
    flat,
    full_key,
    keys_of,
    names_of,
    value_at,
    value_text,
)

# Names that pydantic appends to the key of a value with alternative types.
_ALTERNATIVES = ("constrained-int", "literal['auto']")
# Valid values of keys without a default.
_EXAMPLES = {"batch_size": 64, "epochs": 10}
_LEAST = 0.7  # similarity of a misspelled key


def explained(
    errors: Sequence[ErrorDetails],
    origin: str,
    before: Mapping[str, Any],
    settings: Mapping[str, str],
) -> RecipeError:
    """Return the error of a recipe that is not valid.

    An unknown key comes first: a required key may be missing because it has another name.

    Args:
        errors: errors of pydantic.
        origin: name of the recipe.
        before: the recipe in plain data without settings, whose values the fix can suggest.
        settings: texts of the settings by full keys.
    """
    unknown = [error for error in errors if error["type"] == "unexpected_keyword_argument"]
    error = (unknown or errors)[0]
    path = [str(part) for part in error["loc"] if part not in _ALTERNATIVES]
    *section, name = path
    key = ".".join(path)
    meant = None
    if unknown:
        kind: Any = Recipe
        for part in section:
            kind = section_of(kind, part)
        names = names_of(kind)
        meant = suggest(key, SYNONYMS.values(), least=1.0)
        # Names alone: keys of one section are similar by their beginning.
        sibling = suggest(name, names, least=_LEAST)
        if meant is None and sibling is not None:
            meant = ".".join([*section, sibling])
        if meant is None and not section:
            meant = _similar_end(key, before)
        if meant is None and "options" in names:
            meant = ".".join([*section, "options", name])
        problem = f"unknown key {key}"
        code = "E_UNKNOWN_KEY"
        expected = f"one of the keys {', '.join(names)}"
        fix = f"remove {key}"
    elif error["type"] in ("missing", "missing_argument"):
        problem = f"{key} is missing"
        code = "E_MISSING_KEY"
        expected = "a value; this key has no default"
        fix = f"add {name}: to the recipe, or {key}={_EXAMPLES.get(key, 'VALUE')}"
    else:
        meant = suggest(key, SYNONYMS.values(), least=1.0)  # such as a number for `learning_rate`
        problem = f"{key} is {json.dumps(error['input'])}"
        code = "E_VALUE"
        expected = error["msg"].removeprefix("Input should be ")
        fix = shlex.quote(f"{key}={value_text(_valid_value(key, error, before))}")
    if meant not in (None, key):
        # The setting can be longer than the key of the error: optimizer.option.lr.
        asked = next((one for one in settings if f"{one}.".startswith(f"{key}.")), key)
        meant = f"{meant}{asked[len(key) :]}"
        fix = f"did you mean {_with_value(meant, settings.get(asked))}?"
    return RecipeError(f"{origin}: {problem}", expected=expected, fix=fix, code=code)


def _similar_end(key: str, data: Mapping[str, Any]) -> str | None:
    """Return the full key that ends in a name similar to a misspelled short key, or None."""
    own = (name for name, _, _ in keys_of(Recipe))
    ends = {name.rpartition(".")[2] for name in (*own, *flat(data), *SYNONYMS.values())}
    end = suggest(key, ends, least=_LEAST)
    with suppress(RecipeError):  # several keys end in this name
        if end is not None:
            return full_key(data, end)
    return None


def _with_value(meant: str, text: str | None) -> str:
    """Return the key or the option that was meant, with the value of the setting, if any."""
    if text is None:
        return meant
    if meant.startswith("-"):
        return f"{meant} {shlex.quote(text)}"
    return shlex.quote(f"{meant}={text}")


def _valid_value(key: str, error: ErrorDetails, before: Mapping[str, Any]) -> Any:
    """Return a value that is valid for a key: the nearest choice, that of the file, the default."""
    if error["type"] == "literal_error":
        choices = re.findall("'([^']*)'", str(error.get("ctx", {}).get("expected")))
        return next(iter(get_close_matches(str(error["input"]), choices, n=1)), choices[0])
    value = value_at(before, key.split("."))
    if value is not None and value != error["input"]:
        return value
    for name, entry, section in keys_of(Recipe):
        if name == key and section is None and entry.default is not MISSING:
            return entry.default
    return _EXAMPLES.get(key, "VALUE")
