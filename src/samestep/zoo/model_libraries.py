"""Models of torchvision, timm, transformers and segmentation_models_pytorch by name, without downloads."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from samestep.config.key_suggestions import suggest
from samestep.errors import RecipeError
from samestep.torchvision_import import make_torchvision_importable
from samestep.zoo.options import import_optional, takes
from samestep.zoo.transformers_models import transformers_model

Builder = Callable[..., torch.nn.Module]

# Options by which a library would download weights or settings, with the value that disables the download.
_DOWNLOADS: Mapping[str, object] = {
    "weights": None,
    "weights_backbone": None,
    "pretrained": False,
    "pretrained_cfg": None,
    "pretrained_cfg_overlay": None,
    "checkpoint_path": None,
    "cache_dir": None,
    "encoder_weights": None,
}


def find_in_library(name: str) -> Builder | None:
    """Return the builder of `LIBRARY:MODEL`, or None for names of other libraries.

    A builder takes `num_classes` and the options of the model.

    Raises:
        RecipeError: the library is not installed, or has no such model.
    """
    library, colon, model = name.partition(":")
    finders = {
        "torchvision": torchvision_model,
        "timm": _timm_model,
        "transformers": transformers_model,
        "segmentation_models_pytorch": _segmentation_model,
    }
    return finders[library](model) if colon and library in finders else None


def torchvision_names() -> list[str]:
    """Return the names of torchvision's models."""
    make_torchvision_importable()
    from torchvision.models import list_models

    return list(list_models())


def torchvision_model(name: str) -> Builder:
    """Return the builder of a torchvision model.

    Raises:
        RecipeError: torchvision has no such model.
    """
    if name not in (names := torchvision_names()):
        raise _unknown("torchvision", name, names, "a name of torchvision.models.list_models()")
    from torchvision.models import get_model_builder

    builder = get_model_builder(name)
    # The defaults of segmentation and detection models download a backbone.
    no_weights = {key: None for key in ("weights", "weights_backbone") if takes(builder, key)}

    def build(*, num_classes: int, **options: Any) -> torch.nn.Module:
        return _build(f"torchvision:{name}", builder, {**no_weights, **options, "num_classes": num_classes})

    return build


def _timm_model(name: str) -> Builder:
    timm = import_optional("timm", f"model timm:{name}")
    if not timm.is_model(name):
        raise _unknown("timm", name, timm.list_models(), "a name of timm.list_models()")

    def build(*, num_classes: int, **options: Any) -> torch.nn.Module:
        create = partial(timm.create_model, name, pretrained=False)
        return _build(f"timm:{name}", create, {**options, "num_classes": num_classes})

    return build


def _segmentation_model(name: str) -> Builder:
    library = import_optional("segmentation_models_pytorch", f"model segmentation_models_pytorch:{name}")
    classes = {cls.__name__: cls for cls in library.MODEL_ARCHITECTURES_MAPPING.values()}
    if name not in classes:
        raise _unknown("segmentation_models_pytorch", name, classes, f"one of {', '.join(classes)}")

    def build(*, num_classes: int, **options: Any) -> torch.nn.Module:
        arguments = {"encoder_weights": None, "classes": num_classes, **options}
        return _build(f"segmentation_models_pytorch:{name}", classes[name], arguments)

    return build


def _build(name: str, builder: Builder, options: Mapping[str, Any]) -> torch.nn.Module:
    for key, disabled in _DOWNLOADS.items():
        if options.get(key, disabled) != disabled:
            raise RecipeError(
                f"model.options.{key} is {options[key]!r}",
                expected="no option that downloads weights",
                fix=f"remove model.options.{key} and set model.pretrained to a file of weights",
                code="E_VALUE",
            )
    try:
        return builder(**options)
    except (KeyError, TypeError, ValueError) as error:
        raise RecipeError(
            f"model {name!r}: {error}", expected=f"options of {name}", fix="correct model.options", code="E_VALUE"
        ) from error


def _unknown(library: str, name: str, names: Iterable[str], expected: str) -> RecipeError:
    meant = suggest(name, names)
    fix = "choose a name of the list" if meant is None else f"did you mean {library}:{meant}?"
    return RecipeError(f"{library} has no model {name!r}", expected=expected, fix=fix, code="E_UNKNOWN_NAME")
