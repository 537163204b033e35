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

# Options by which a library would download weights or settings, with the value that disables the
# download.
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
    finders: Mapping[str, Callable[[str], Builder]] = {
        "torchvision": torchvision_model,
        "timm": _timm_model,
        "transformers": transformers_model,
        "segmentation_models_pytorch": _segmentation_model,
    }
    if colon and library in finders:
        return finders[library](model)
    return None


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
    _require_known("torchvision", name, torchvision_names())
    from torchvision.models import get_model_builder

    builder = get_model_builder(name)
    # The defaults of segmentation and detection models download a backbone.
    no_weights = {key: None for key in ("weights", "weights_backbone") if takes(builder, key)}
    return _offline(f"torchvision:{name}", partial(builder, **no_weights), "num_classes")


def _timm_model(name: str) -> Builder:
    timm = import_optional("timm", f"model timm:{name}")
    if not timm.is_model(name):  # a name can have a tag of weights
        _require_known("timm", name, timm.list_models())
    return _offline(
        f"timm:{name}", partial(timm.create_model, name, pretrained=False), "num_classes"
    )


def _segmentation_model(name: str) -> Builder:
    library = import_optional(
        "segmentation_models_pytorch", f"model segmentation_models_pytorch:{name}"
    )
    classes = {cls.__name__: cls for cls in library.MODEL_ARCHITECTURES_MAPPING.values()}
    _require_known("segmentation_models_pytorch", name, classes)
    return _offline(
        f"segmentation_models_pytorch:{name}",
        partial(classes[name], encoder_weights=None),
        "classes",
    )


def _offline(name: str, builder: Builder, classes: str) -> Builder:
    """Return a builder that refuses downloads; `classes` is the library's name of the number of classes."""

    def build(*, num_classes: int, **options: Any) -> torch.nn.Module:
        for key, disabled in _DOWNLOADS.items():
            if options.get(key, disabled) != disabled:
                raise RecipeError(
                    f"model.options.{key} is {options[key]!r}",
                    expected="no option that downloads weights",
                    fix=f"remove model.options.{key} and set model.pretrained to a file of weights",
                    code="E_VALUE",
                )
        try:
            return builder(**{**options, classes: num_classes})
        except (KeyError, TypeError, ValueError) as error:
            problem = f"model {name!r}: {error}"
            expected = f"options of {name}"
            raise RecipeError(problem, expected, "correct model.options", code="E_VALUE") from error

    return build


def _require_known(library: str, name: str, names: Iterable[str]) -> None:
    known = list(names)
    if name not in known:
        meant = suggest(name, known)
        fix = (
            "choose a model of the library" if meant is None else f"did you mean {library}:{meant}?"
        )
        expected = f"one of the {len(known)} models of {library}, such as {', '.join(known[:5])}"
        raise RecipeError(f"{library} has no model {name!r}", expected, fix, code="E_UNKNOWN_NAME")
