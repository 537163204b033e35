"""Checks of options and optional libraries that a recipe names."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from importlib import import_module
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from samestep.config.key_suggestions import suggest
from samestep.config.validation import require_package, section_of
from samestep.distributed.torch_errors import is_out_of_memory
from samestep.errors import DataError, RecipeError
from samestep.report_text import class_name, message_of
from samestep.torchvision_import import make_torchvision_importable

Kind = TypeVar("Kind")


def call(
    function: Callable[..., Any], options: Mapping[str, Any], *arguments: Any, where: str
) -> Any:
    """Return `function(*arguments, **options)`; `where` is the recipe key of the options.

    Raises:
        RecipeError: an option is unknown or missing, or a function of Samestep, torch or
            torchvision refuses the values. Errors of other functions are those of the user's code,
            and need their traceback.
    """
    module = str(getattr(function, "__module__", "")).partition(".")[0]
    is_library = module in ("samestep", "torch", "torchvision")
    parameters = inspect.signature(function).parameters
    positional = list(parameters)[: len(arguments)]
    names = list(parameters)[len(arguments) :]
    kinds = {parameter.kind for parameter in parameters.values()}
    for key in options:
        is_known = key in names or inspect.Parameter.VAR_KEYWORD in kinds
        if key in positional or not is_known:
            raise unknown_option(where, key, names)
    for name in names:
        parameter = parameters[name]
        is_named = parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
        is_required = parameter.default is parameter.empty and is_named
        if is_required and name not in options:
            raise RecipeError(
                f"{where}.{name} is missing",
                expected="a value; this option has no default",
                fix=f"{where}.{name}=VALUE",
                code="E_MISSING_KEY",
            )
        if is_library:
            _require_type(f"{where}.{name}", parameter, options.get(name))
    try:
        return function(*arguments, **options)
    except (LookupError, RuntimeError, TypeError, ValueError, ZeroDivisionError) as error:
        # Without options, the fault is not in the recipe.
        if not options or not is_library or is_out_of_memory(error):
            raise
        message = next(iter(message_of(error).strip().splitlines()), "")
        values = ", ".join(f"{where}.{key} is {value!r}" for key, value in options.items())
        raise RecipeError(
            f"{values}: {class_name(error)}: {message}",
            expected="values with which the component can be built",
            fix=f"correct {' or '.join(f'{where}.{key}' for key in options)}",
            code="E_VALUE",
        ) from error


def returned(value: Any, kind: type[Kind], name: str, fix: str = "return it") -> Kind:
    """Require what a component of a recipe returned."""
    if not isinstance(value, kind):
        problem = f"{name} returned a {class_name(value)}"
        expected = f"a {kind.__module__}.{kind.__name__}"
        raise RecipeError(problem, expected, fix, code="E_VALUE")
    return value


def validated(
    kind: type[Kind], options: Mapping[str, Any], *, loader: Callable[..., Any] | None = None
) -> Kind:
    """Return a dataclass of pydantic from `data.options` of a recipe.

    Args:
        kind: the dataclass.
        options: its fields.
        loader: function with further options as parameters at the same key, for errors.

    Raises:
        RecipeError: an option is unknown or has an invalid value.
    """
    try:
        # Strict validation of JSON accepts lists for tuples, but no other conversions, such as of
        # `true` to a number.
        return TypeAdapter(kind).validate_json(json.dumps(options), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        # Other parts are positions in lists, and names of alternative types.
        names = [part for part in first["loc"] if isinstance(part, str) and part.isidentifier()]
        key = ".".join(["data.options", *names])
        if first["type"] == "unexpected_keyword_argument":
            owner: Any = kind
            for name in names[:-1]:
                owner = section_of(owner, name)
            known = [field.name for field in fields(owner)]
            if loader is not None and len(names) == 1:
                parameters = inspect.signature(loader).parameters
                known += [name for name in parameters if name != "options"]
            where = ".".join(["data.options", *names[:-1]])
            raise unknown_option(where, names[-1], known) from error
        problem = f"{key} is {first['input']!r}"
        expected = first["msg"].removeprefix("Input should be ")
        if first["type"] == "value_error":  # of several options
            problem = f"{key}: {first['ctx']['error']}"
            expected = "options that fit each other"
        raise RecipeError(problem, expected, f"correct {key}", code="E_VALUE") from error


def _require_type(key: str, parameter: inspect.Parameter, value: object) -> None:
    """Require a boolean for `bool`, because all text is true, and text for `str`."""
    # By the text: modules of the package do not evaluate their annotations.
    kind = {"bool": bool, "str": str, "str | None": str}.get(str(parameter.annotation))
    if value is None or kind is None or isinstance(value, kind):
        return
    expected = "text; YAML reads some words as numbers or booleans"
    fix = f"""quote the value: '{key}="..."'"""
    if kind is bool:
        expected = "true or false"
        fix = f"{key}=true"
    raise RecipeError(f"{key} is {json.dumps(value)}", expected, fix, code="E_VALUE")


def takes(function: Callable[..., Any], name: str) -> bool:
    """Return whether `function` has a parameter called `name`."""
    return name in inspect.signature(function).parameters


def unknown_option(where: str, key: str, names: list[str]) -> RecipeError:
    """Return the error for an option `key` that is not one of `names`."""
    synonym = suggest(f"{where}.{key}", [f"{where}.{name}" for name in names], least=1.0)
    similar = suggest(key, names)
    fix = f"remove {where}.{key}"
    if synonym is not None or similar is not None:
        fix = f"did you mean {synonym or f'{where}.{similar}'}?"
    return RecipeError(
        f"{where}.{key} is not an option",
        expected=f"one of the options {', '.join(names) or '(none)'}",
        fix=fix,
        code="E_UNKNOWN_OPTION",
    )


def require_option(
    name: str, value: object, is_valid: bool, expected: str, example: object
) -> None:
    """Require a condition on `data.options.NAME`.

    Args:
        name: the option.
        value: its value.
        is_valid: the condition.
        expected: the condition in words.
        example: a valid value.

    Raises:
        DataError: the condition does not hold.
    """
    if not is_valid:
        key = f"data.options.{name}"
        fix = f"{key}={example}"
        raise DataError(f"{key} is {value!r}", expected=expected, fix=fix, code="E_VALUE")


def unusable(problem: str, expected: str, fix: str, code: str) -> DataError:
    """Return the error of one sample, which a recipe can leave out; `fix` is the other way out."""
    fix = f"{fix}, or skip such samples: data.bad_samples: skip"
    return DataError(problem, expected, fix, code=code)


def is_count(value: object, least: int = 1) -> bool:
    """Return whether a value is an integer of at least `least`; `true` of YAML is none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def require_count(name: str, value: object, least: int, example: int) -> None:
    """Require that `data.options.NAME` is an integer of at least `least`.

    Raises:
        DataError: `value` is something else.
    """
    require_option(name, value, is_count(value, least), f"an integer >= {least}", example)


def import_optional(module: str, needed_by: str) -> Any:
    """Return a module of an optional library.

    Args:
        module: name of the module.
        needed_by: part of the recipe that needs it, such as `model timm:resnet10t`.

    Raises:
        RecipeError: the library is not installed.
    """
    # Libraries such as timm import torchvision.
    make_torchvision_importable()
    require_package(needed_by, module.partition(".")[0], "'samestep[zoo]'")
    return import_module(module)
