"""Shell patterns by which a recipe chooses parts of a model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from samestep.errors import RecipeError


def chosen(names: Iterable[str], patterns: Sequence[str], *, key: str, what: str, example: str) -> list[str]:
    """The names that match one of the patterns, in their own order.

    Args:
        key: where the recipe has the patterns.
        what: what the names are of.

    Raises:
        RecipeError: a pattern matches nothing.
    """
    known = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            close = get_close_matches(pattern, known, n=2, cutoff=0.3)
            raise RecipeError(
                f"{key}: {pattern!r} matches no {what}",
                rule=f"shell patterns of {what} names, such as {example}",
                do=f"names like {', '.join(close or known[:2])}",
            )
    return [name for name in known if any(fnmatchcase(name, pattern) for pattern in patterns)]
