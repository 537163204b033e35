"""Constraints and shell patterns shared by the configuration classes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args, get_type_hints

from samestep.config.key_suggestions import nearest_path
from samestep.errors import RecipeError

if TYPE_CHECKING:
    from pydantic import TypeAdapter


class Constrained:
    """Base class of configuration dataclasses whose values pydantic validates on construction.

    Defaults are valid, so that a process without other values does not import pydantic. Subclasses
    give `key_prefix`, the text in front of the names of their fields in error messages.
    """

    __pydantic_config__: ClassVar = {"extra": "forbid"}
    _key_prefix: ClassVar[str]

    def __init_subclass__(cls, key_prefix: str = "") -> None:
        cls._key_prefix = key_prefix

    def __post_init__(self) -> None:
        for item in fields(self):  # type: ignore[arg-type]
            value = getattr(self, item.name)
            # A nested configuration has validated itself.
            if not isinstance(value, Constrained) and value != _default(item):
                self._validate(item, value)

    def _validate(self, item: Field[Any], value: Any) -> None:
        from pydantic import ValidationError

        try:
            # Strict: "64" is no number, and 1 is no boolean.
            validator = _validator(type(self), item.name)  # type: ignore[arg-type]
            validator.validate_python(value, strict=True)
        except ValidationError as error:
            key = self.key(item.name)
            expected = " or ".join(
                detail["msg"].removeprefix("Input should be ") for detail in error.errors()
            )
            fix = f"set {key} to such a value"
            if _default(item) is not MISSING:
                fix = f"leave {key} out for its default"
            raise RecipeError(f"{key} is {value!r}", expected, fix, code="E_VALUE") from None

    @classmethod
    def key(cls, name: str) -> str:
        """Return the name of a field in error messages."""
        return f"{cls._key_prefix}{name}"


def _default(item: Field[Any]) -> Any:
    if item.default_factory is MISSING:
        return item.default
    return item.default_factory()


@cache
def _validator(kind: type, name: str) -> TypeAdapter[Any]:
    from pydantic import TypeAdapter

    # Annotations are text until here; the constraints are their extras.
    return TypeAdapter(get_type_hints(kind, include_extras=True)[name])


def section_of(kind: Any, name: str) -> Any:
    """Return the class of a section of a configuration class, or None for a value."""
    # The type of an optional section is `Section | None`.
    hint = get_type_hints(kind)[name]
    return next((option for option in (hint, *get_args(hint)) if is_dataclass(option)), None)


def require(condition: bool, value: str, expected: str, fix: str, *, code: str = "E_VALUE") -> None:
    """Raise a `RecipeError` with these sections unless the condition is true."""
    if not condition:
        raise RecipeError(value, expected=expected, fix=fix, code=code)


def require_path(
    path: Path, kind: Literal["file", "folder"], expected: str, fix: str = "correct the path"
) -> None:
    """Require that a file or a folder exists; otherwise suggest a similar name, or `fix`.

    Raises:
        RecipeError: `path` does not exist, or is of the other kind.
    """
    if not (path.is_file() if kind == "file" else path.is_dir()):
        place = "" if path.is_absolute() else f" in {Path.cwd()}"
        near = nearest_path(path)
        if near is not None:
            fix = f"did you mean {near}?"
        problem = f"there is no {kind} {path}{place}"
        raise RecipeError(problem, expected=expected, fix=fix, code="E_FILE_MISSING")


def require_package(subject: str, package: str, fix: str) -> None:
    """Require an optional package.

    Raises:
        RecipeError: it is not installed.
    """
    # Not an import, which can take seconds.
    if find_spec(package) is None:
        value = f"{subject} needs {package}"
        expected = "installed packages of the selected loggers, formats and models"
        raise RecipeError(value, expected, f"pip install {fix}", code="E_NOT_INSTALLED")


def match_patterns(
    names: Iterable[str], patterns: Sequence[str], *, key: str, kind: str, example: str
) -> list[str]:
    """Return the names that match one of the shell patterns, in the order of `names`.

    Errors name the recipe key of the patterns, the kind of the names, such as `parameter`, and a
    valid pattern.

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
