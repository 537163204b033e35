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
from samestep.recipes.zoo import find_in_library, torchvision_model, torchvision_names

DATA = {
    "digits": "samestep.recipes.digits:load_digits",
    "images": "samestep.recipes.images.folders:load_images",
    "image_list": "samestep.recipes.images.lists:load_image_list",
    "hub_images": "samestep.recipes.images.hub:load_hub_images",
    "language": "samestep.recipes.text.language:load_language",
    "segmentation": "samestep.recipes.masks.segmentation:load_segmentation",
    "texts": "samestep.recipes.text.texts:load_texts",
    "tokens": "samestep.recipes.text.tokens:load_tokens",
    "volumes": "samestep.recipes.masks.volumes:load_volumes",
}
MODELS = {
    "digits_net": "samestep.recipes.digits:DigitsNet",
    "gpt": "samestep.recipes.text.gpt:GPT",
    "gpt2": "samestep.recipes.text.gpt:gpt2",
    "tokens_net": "samestep.recipes.text.tokens:TokensNet",
    "transformers:bert": "samestep.recipes.text.models:bert",
    "transformers:gpt2": "samestep.recipes.text.models:gpt2",
    "transformers:roberta": "samestep.recipes.text.models:roberta",
    "unet": "samestep.recipes.masks.unet:unet",
    "unet_vgg16": "samestep.recipes.masks.unet:unet_vgg16",
    "unet_resnet34": "samestep.recipes.masks.unet:unet_resnet34",
    "unet_resnet101": "samestep.recipes.masks.unet:unet_resnet101",
    "unet_small": "samestep.recipes.masks.unet:unet_small",
    "unet_3d": "samestep.recipes.masks.unet:unet_3d",
}
LOSSES = {
    "cross_entropy": "samestep.engine.loss:cross_entropy",
    "bce_with_logits": "samestep.recipes.masks.losses:bce_with_logits",
    "dice_loss": "samestep.recipes.masks.losses:dice_loss",
    "dice_plus": "samestep.recipes.masks.losses:DicePlus",
}
# From a run's classes and the options of its data to a samestep.recipes.task.Task.
TASKS: dict[str, str] = {
    "digits": "samestep.recipes.digits:digits_task",
    "language": "samestep.recipes.text.language:language_task",
    "texts": "samestep.recipes.text.texts:text_task",
    "images": "samestep.recipes.images.folders:image_task",
    "image_list": "samestep.recipes.images.folders:image_task",
    "hub_images": "samestep.recipes.images.folders:image_task",
    "segmentation": "samestep.recipes.masks.segmentation:segmentation_task",
    "volumes": "samestep.recipes.masks.volumes:volumes_task",
}
OPTIMIZERS = {"sgd": "torch.optim:SGD", "adam": "torch.optim:Adam", "adamw": "torch.optim:AdamW"}

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def find(name: str, known: Mapping[str, str], what: str) -> Callable[..., Any]:
    """What `name` stands for: a short name of `known`, or `package.module:attribute`.

    Models can also be named as `torchvision:MODEL` (or just `MODEL`), `timm:MODEL` and `transformers:MODEL`. Modules
    beside the current folder can be named too.

    Raises:
        RecipeError: there is no such thing.
    """
    if known is MODELS and name not in known and (builder := find_in_library(name)) is not None:
        return builder
    module, colon, attribute = known.get(name, name).partition(":")
    if not colon:
        return _model_or_nothing(name, known, what)
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


def _model_or_nothing(name: str, known: Mapping[str, str], what: str) -> Callable[..., Any]:
    """A model of torchvision by its bare name, if models are looked for and it has one."""
    more = torchvision_names() if known is MODELS else []
    if name in more:
        return torchvision_model(name)
    close = get_close_matches(name, [*known, *more], n=1)
    also = ", a model of torchvision" if more else ""
    raise RecipeError(
        f"{what} {name!r} is not known",
        rule=f"one of {', '.join(known)}{also}, or package.module:attribute",
        do=f"did you mean {close[0]}?" if close else "give its import path",
    )
