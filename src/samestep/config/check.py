"""What the classes of a recipe share."""

from __future__ import annotations

from samestep.errors import RecipeError

# Read by pydantic, which checks these classes against YAML; a plain mapping, so nothing is imported for it.
NOTHING_UNKNOWN = {"extra": "forbid"}


def require(holds: bool, value: str, rule: str, do: str) -> None:
    """Refuse a value that cannot be.

    Raises:
        RecipeError: it does not hold.
    """
    if not holds:
        raise RecipeError(value, rule=rule, do=do)
