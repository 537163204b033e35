"""Options said without the word: `data.path` for `data.options.path`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, get_type_hints

from samestep.config import Part, Recipe
from samestep.errors import RecipeError

# The parts of a recipe that have options, and their own keys.
_PARTS = {
    name: tuple(field.name for field in fields(kind))
    for name, kind in get_type_hints(Recipe).items()
    if isinstance(kind, type) and issubclass(kind, Part)
}
# A key this close to one of a part's own is more likely a slip than an option.
_SLIP = 0.8


def full_key(keys: Sequence[str], value: Any) -> list[str]:
    """Where a value belongs: `[data, path]` is `[data, options, path]` unless data has such a key of its own.

    A mapping stays where it is, so that `data.option.path` is refused and not taken for an option called `option`.
    """
    match list(keys):
        case [part, key] if _is_option(part, key, value):
            return [part, "options", key]
        case whole:
            return whole


def with_options(data: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """A recipe's plain data in which every option stands under `options`.

    Raises:
        RecipeError: an option is said both ways.
    """
    return {key: _gathered(key, value, origin) if isinstance(value, dict) else value for key, value in data.items()}


def own_option(where: Sequence[str]) -> str | None:
    """For the error about an unknown key of a part: how to say an option that is really called so."""
    match list(where):
        case [part, key] if part in _PARTS:
            return f"{part}.options.{key}"
        case _:
            return None


def _gathered(part: str, said: Mapping[str, Any], origin: str) -> dict[str, Any]:
    moved = {key: value for key, value in said.items() if _is_option(part, key, value)}
    options = said.get("options", {})
    if not moved or not isinstance(options, dict):  # what it is instead is refused later, by name
        return dict(said)
    for key in moved:
        if key in options:
            raise RecipeError(
                f"{origin}: {part}.{key} and {part}.options.{key} are both given",
                rule="an option is said once; the first is short for the second",
                do=f"remove {part}.{key}",
            )
    rest = {key: value for key, value in said.items() if key not in moved}
    return {**rest, "options": {**options, **moved}}


def _is_option(part: str, key: str, value: Any) -> bool:
    own = _PARTS.get(part, ())
    if not own or key in own or not key or isinstance(value, Mapping):
        return False
    return not get_close_matches(key, own, n=1, cutoff=_SLIP)
