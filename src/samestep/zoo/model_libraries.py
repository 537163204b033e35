"""Models of torchvision, timm and transformers by name. Weights are never downloaded; they are read from files."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from samestep.errors import RecipeError
from samestep.torchvision_import import make_torchvision_importable
from samestep.zoo.options import import_optional, require_path, takes, unknown_option

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
}


def find_in_library(name: str) -> Builder | None:
    """Return the builder of `torchvision:MODEL`, `timm:MODEL` or `transformers:MODEL`, or None for other names.

    A builder takes `num_classes` and the options of the model.

    Raises:
        RecipeError: the library is not installed, or has no such model.
    """
    library, colon, model = name.partition(":")
    finders = {"torchvision": torchvision_model, "timm": _timm_model, "transformers": _transformers_model}
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


def _transformers_model(name: str) -> Builder:
    transformers = import_optional("transformers", f"model transformers:{name}")
    config_of = _config_of_folder(transformers, Path(name)) if "/" in name else _config_of_class(transformers, name)

    def build(*, num_classes: int, attn_implementation: str | None = None, **options: Any) -> torch.nn.Module:
        config = config_of({**options, "num_labels": num_classes})
        attention = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
        builder = transformers.AutoModelForImageClassification.from_config
        model = _build(f"transformers:{name}", builder, {"config": config, "dtype": torch.float32, **attention})
        # A wrapper module would add a prefix to the parameter names; a hook keeps the names of the library.
        model.register_forward_hook(_logits)
        return model

    return build


def _logits(model: torch.nn.Module, inputs: Any, outputs: Any) -> torch.Tensor:
    logits: torch.Tensor = outputs.logits
    return logits


def _config_of_folder(transformers: Any, folder: Path) -> Callable[[Mapping[str, Any]], Any]:
    require_path(
        folder / "config.json",
        "file",
        "a folder written by save_pretrained; models are not downloaded",
        "download the model first (hf download NAME --local-dir FOLDER), or name a class: "
        "transformers:ViTForImageClassification",
    )

    def config_of(options: Mapping[str, Any]) -> Any:
        try:
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise RecipeError(
                f"model 'transformers:{folder}': {error}",
                expected="a config.json of transformers",
                fix=f"correct {folder / 'config.json'}, or download the folder again",
                code="E_UNREADABLE",
            ) from error
        _check_options(type(config), options)
        for key, value in options.items():
            setattr(config, key, value)
        return config

    return config_of


def _config_of_class(transformers: Any, name: str) -> Callable[[Mapping[str, Any]], Any]:
    auto = import_module("transformers.models.auto.modeling_auto")
    values = auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES.values()
    names = [value if isinstance(value, str) else value[0] for value in values]
    if name not in names:
        expected = "an image classification class, or a folder with a config.json (./FOLDER)"
        raise _unknown("transformers", name, names, expected)
    config_class = getattr(transformers, name).config_class

    def config_of(options: Mapping[str, Any]) -> Any:
        _check_options(config_class, options)
        return config_class(**options)

    return config_of


def _check_options(config_class: Any, options: Mapping[str, Any]) -> None:
    """Refuse unknown options; the configuration classes of transformers accept any name."""
    known = [*inspect.signature(config_class.__init__).parameters, *config_class.attribute_map, "num_labels"]
    for key in options:
        if key not in known:
            raise unknown_option("model.options", key, known)


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
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"model {name!r}: {error}", expected=f"options of {name}", fix="correct model.options", code="E_VALUE"
        ) from error


def _unknown(library: str, name: str, names: Iterable[str], expected: str) -> RecipeError:
    close = get_close_matches(name, list(names), n=1)
    fix = f"did you mean {library}:{close[0]}?" if close else "choose a name of the list"
    return RecipeError(f"{library} has no model {name!r}", expected=expected, fix=fix, code="E_UNKNOWN_NAME")
