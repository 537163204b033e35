"""Short names and import paths of datasets, models, losses and optimizers."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

from samestep.errors import RecipeError
from samestep.runtime.vision import make_torchvision_importable

DATA = {
    "digits": "samestep.recipes.digits:load_digits",
    "images": "samestep.recipes.images:load_images",
    "tokens": "samestep.recipes.tokens:load_tokens",
}
MODELS = {"digits_net": "samestep.recipes.digits:DigitsNet", "tokens_net": "samestep.recipes.tokens:TokensNet"}
LOSSES = {"cross_entropy": "samestep.engine.loss:cross_entropy"}
# From a run's classes and the options of its data to a samestep.recipes.task.Task.
TASKS: dict[str, str] = {}
OPTIMIZERS = {"sgd": "torch.optim:SGD", "adam": "torch.optim:Adam", "adamw": "torch.optim:AdamW"}

_TORCHVISION = "torchvision:"
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def find(name: str, known: Mapping[str, str], what: str) -> Callable[..., Any]:
    """What `name` stands for: a short name of `known`, `torchvision:MODEL`, or `package.module:attribute`.

    Modules beside the current folder can be named too.

    Raises:
        RecipeError: there is no such thing.
    """
    if name.startswith(_TORCHVISION):
        return _torchvision_model(name.removeprefix(_TORCHVISION))
    module, colon, attribute = known.get(name, name).partition(":")
    if not colon:
        close = get_close_matches(name, known, n=1)
        raise RecipeError(
            f"{what} {name!r} is not known",
            rule=f"one of {', '.join(known)}, or package.module:attribute",
            do=f"did you mean {close[0]}?" if close else "give its import path",
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name):
            raise  # the module is there; what it imports is not
        raise RecipeError(
            f"{what} {name!r}: no module {module}", rule="package.module:attribute", do="look at the import path"
        ) from error
    except AttributeError as error:
        raise RecipeError(
            f"{what} {name!r}: {error}", rule="package.module:attribute", do="look at the name after the colon"
        ) from error
    if not callable(found):
        raise RecipeError(f"{what} {name!r} is a {type(found).__name__}", rule="it can be called", do="name a function")
    return found  # type: ignore[no-any-return]


def call(function: Callable[..., Any], options: Mapping[str, Any], *arguments: Any, where: str) -> Any:
    """`function(*arguments, **options)`; an option that it does not take is refused by name.

    Raises:
        RecipeError: an option is unknown or missing.
    """
    parameters = inspect.signature(function).parameters
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    given, named = list(parameters)[: len(arguments)], list(parameters)[len(arguments) :]
    unknown = [key for key in options if key in given or (key not in named and not takes_any)]
    if unknown:
        close = get_close_matches(unknown[0], named, n=1)
        raise RecipeError(
            f"{where}.{unknown[0]} is not an option",
            rule=f"options here: {', '.join(named) or 'none'}",
            do=f"did you mean {where}.{close[0]}?" if close else "remove it",
        )
    needed = [name for name in named if parameters[name].default is inspect.Parameter.empty]
    missing = [name for name in needed if parameters[name].kind in _NAMED and name not in options]
    if missing:
        raise RecipeError(
            f"{where}.{missing[0]} is not given", rule="it has no default", do=f"--set {where}.{missing[0]}=VALUE"
        )
    return function(*arguments, **options)


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a parameter of `function` has that name."""
    return name in inspect.signature(function).parameters


def _torchvision_model(name: str) -> Callable[..., Any]:
    make_torchvision_importable()
    from torchvision.models import get_model_builder, list_models

    try:
        return get_model_builder(name)  # type: ignore[no-any-return]
    except ValueError as error:
        close = get_close_matches(name, list_models(), n=1)
        raise RecipeError(
            f"torchvision has no model {name!r}",
            rule="a name of torchvision.models.list_models()",
            do=f"did you mean torchvision:{close[0]}?" if close else "look at the list",
        ) from error
