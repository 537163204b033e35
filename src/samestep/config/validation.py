"""Constraints and shell patterns shared by the configuration classes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from typing import Annotated, ClassVar, Literal, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt

from samestep.errors import RecipeError

_Bound = tuple[str, Callable[..., bool], float]  # sign, comparison and limit
_COMPARISONS: dict[type, tuple[str, Callable[..., bool]]] = {
    Ge: (">=", operator.ge),
    Gt: (">", operator.gt),
    Le: ("<=", operator.le),
    Lt: ("<", operator.lt),
}


class Constrained:
    """Base class of configuration dataclasses that checks `Literal` types and bounds on construction.

    Pydantic enforces the same annotations when a recipe is read from YAML. `annotated_types` declares the bounds
    without importing pydantic in Python programs and ranks.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    key_prefix: ClassVar[str] = ""

    def __post_init__(self) -> None:
        defaults = {field.name: field.default for field in fields(self)}  # type: ignore[arg-type]
        for name, (choices, bounds, has_tuple) in _constraints(type(self)).items():  # type: ignore[arg-type]
            key, value, expected = self.key(name), getattr(self, name), None
            is_valid = has_tuple and isinstance(value, tuple)
            is_valid |= value in (*choices, defaults[name])  # the default can be None
            if choices and not bounds and not is_valid:
                expected = f"{'a tuple, or ' if has_tuple else 'one of '}{', '.join(choices)}"
            # NaN violates every bound.
            elif value not in (None, *choices) and not all(holds(value, limit) for _, holds, limit in bounds):
                expected = " or ".join(
                    [f"{key} {' and '.join(f'{sign} {limit}' for sign, _, limit in bounds)}", *choices]
                )
            if expected is not None:
                has_default = defaults[name] is not MISSING
                fix = f"leave {key} out for its default" if has_default else f"set {key} to such a value"
                raise RecipeError(f"{key} is {value!r}", expected, fix, code="E_VALUE")

    @classmethod
    def key(cls, name: str) -> str:
        """Return the name of a field in error messages."""
        return f"{cls.key_prefix}{name}"


@cache
def _constraints(cls: type) -> dict[str, tuple[tuple[str, ...], list[_Bound], bool]]:
    """Return the allowed values, the bounds, and whether a tuple is valid too, of each constrained field."""
    constraints: dict[str, tuple[tuple[str, ...], list[_Bound], bool]] = {}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        has_tuple = any(get_origin(part) is tuple for part in get_args(hint))
        for part in (hint, *get_args(hint)):  # a constraint can be one alternative of a union
            choices, bounds, _ = constraints.get(name, ((), [], False))
            if get_origin(part) is Literal:
                constraints[name] = (get_args(part), bounds, has_tuple)
            elif get_origin(part) is Annotated:
                # The limit is the attribute of the class's name: `Ge.ge`.
                limits = [(type(bound), getattr(bound, type(bound).__name__.lower())) for bound in part.__metadata__]
                constraints[name] = (choices, [(*_COMPARISONS[kind], limit) for kind, limit in limits], has_tuple)
    return constraints


def require(condition: bool, value: str, expected: str, fix: str, *, code: str = "E_VALUE") -> None:
    """Raise a `RecipeError` with these sections unless the condition is true."""
    if not condition:
        raise RecipeError(value, expected=expected, fix=fix, code=code)


def match_patterns(names: Iterable[str], patterns: Sequence[str], *, key: str, kind: str, example: str) -> list[str]:
    """Return the names that match one of the shell patterns, in the order of `names`.

    Errors name the recipe key of the patterns, the kind of the names, such as `parameter`, and a valid pattern.

    Raises:
        RecipeError: a pattern matches no name.
    """
    known = list(names)
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            close = get_close_matches(pattern, known, n=2, cutoff=0.3)
            raise RecipeError(
                f"{key}: {pattern!r} matches no {kind}",
                expected=f"shell patterns of {kind} names, such as {example}",
                fix=f"use names like {', '.join(close or known[:2])}",
                code="E_PATTERN",
            )
    return [name for name in known if any(fnmatchcase(name, pattern) for pattern in patterns)]
