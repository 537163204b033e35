"""Recipes key by key, and where those of several runs differ."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def flat(recipe: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Every leaf by its whole key, such as `optimizer.options.lr`, as text."""
    found: dict[str, str] = {}
    for key, value in recipe.items():
        if isinstance(value, Mapping) and value:
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return found


def differing(recipes: Sequence[Mapping[str, Any]]) -> dict[str, list[str | None]]:
    """The keys whose values are not the same in all recipes, with that of each; None where one has no such key."""
    leaves = [flat(recipe) for recipe in recipes]
    keys = dict.fromkeys(key for recipe in leaves for key in recipe)
    values = {key: [recipe.get(key) for recipe in leaves] for key in keys}
    return {key: row for key, row in values.items() if len(set(row)) > 1}
