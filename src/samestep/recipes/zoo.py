"""Models of torchvision, timm and transformers by name. Nothing is ever downloaded: weights come from a file."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from samestep.errors import RecipeError
from samestep.runtime.vision import make_torchvision_importable

Builder = Callable[..., torch.nn.Module]

# Options by which a library would fetch weights or settings, and what stands for "do not".
_FETCHING: Mapping[str, object] = {
    "weights": None,
    "weights_backbone": None,
    "pretrained": False,
    "pretrained_cfg": None,
    "pretrained_cfg_overlay": None,
    "checkpoint_path": None,
    "cache_dir": None,
}


def find_in_library(name: str) -> Builder | None:
    """The builder behind `torchvision:MODEL`, `timm:MODEL` or `transformers:MODEL`; None for any other name.

    A builder takes `num_classes`, and the options of the model.

    Raises:
        RecipeError: the library is not installed, or has no such model.
    """
    library, colon, rest = name.partition(":")
    makers = {"torchvision": torchvision_model, "timm": _timm_model, "transformers": _transformers_model}
    return makers[library](rest) if colon and library in makers else None


def torchvision_names() -> list[str]:
    """The models that torchvision has, which can be named without its name too."""
    make_torchvision_importable()
    from torchvision.models import list_models

    return list(list_models())


def torchvision_model(name: str) -> Builder:
    """The builder of a model of torchvision.

    Raises:
        RecipeError: there is none of that name.
    """
    if name not in (names := torchvision_names()):
        raise _unknown("torchvision", name, names, "a name of torchvision.models.list_models()")
    from torchvision.models import get_model_builder

    builder = get_model_builder(name)
    # Segmentation and detection fetch a backbone unless they are told not to.
    given = {key: None for key in ("weights", "weights_backbone") if key in inspect.signature(builder).parameters}

    def build(*, num_classes: int, **options: Any) -> torch.nn.Module:
        return _made(f"torchvision:{name}", builder, {**given, **options, "num_classes": num_classes})

    return build


def _timm_model(name: str) -> Builder:
    timm = _library("timm")
    if not timm.is_model(name):
        raise _unknown("timm", name, timm.list_models(), "a name of timm.list_models()")

    def create(**options: Any) -> torch.nn.Module:
        made: torch.nn.Module = timm.create_model(name, pretrained=False, **options)
        return made

    def build(*, num_classes: int, **options: Any) -> torch.nn.Module:
        return _made(f"timm:{name}", create, {**options, "num_classes": num_classes})

    return build


def _transformers_model(name: str) -> Builder:
    transformers = _library("transformers")
    config_of = _config_of_folder(transformers, Path(name)) if "/" in name else _config_of_class(transformers, name)

    def build(*, num_classes: int, attn_implementation: str | None = None, **options: Any) -> torch.nn.Module:
        config = config_of({**options, "num_labels": num_classes})
        more = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
        make = transformers.AutoModelForImageClassification.from_config
        model = _made(f"transformers:{name}", make, {"config": config, "dtype": torch.float32, **more})
        # A hook and no module around it, so that names of weights stay the model's own.
        model.register_forward_hook(_logits)
        return model

    return build


def _logits(model: torch.nn.Module, inputs: Any, outputs: Any) -> torch.Tensor:
    logits: torch.Tensor = outputs.logits
    return logits


def _config_of_folder(transformers: Any, folder: Path) -> Callable[[Mapping[str, Any]], Any]:
    if not (folder / "config.json").is_file():
        raise RecipeError(
            f"model 'transformers:{folder}': there is no file {folder / 'config.json'}",
            rule="a folder that save_pretrained wrote; nothing is downloaded",
            do="download it first (hf download NAME --local-dir FOLDER), or name a class: "
            "transformers:ViTForImageClassification",
        )

    def config_of(options: Mapping[str, Any]) -> Any:
        try:
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError) as error:
            raise RecipeError(
                f"model 'transformers:{folder}': {error}", rule="a config.json of transformers", do="look at the file"
            ) from error
        _require_options(type(config), options)
        for key, value in options.items():
            setattr(config, key, value)
        return config

    return config_of


def _config_of_class(transformers: Any, name: str) -> Callable[[Mapping[str, Any]], Any]:
    auto = import_module("transformers.models.auto.modeling_auto")
    values = auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES.values()
    names = [value if isinstance(value, str) else value[0] for value in values]
    if name not in names:
        raise _unknown(
            "transformers", name, names, "a class of image classifiers, or a folder with a config.json (./FOLDER)"
        )
    kind = getattr(transformers, name).config_class

    def config_of(options: Mapping[str, Any]) -> Any:
        _require_options(kind, options)
        return kind(**options)

    return config_of


def _require_options(kind: Any, options: Mapping[str, Any]) -> None:
    """Refuse an option that a configuration does not have; transformers itself takes anything."""
    known = [*inspect.signature(kind.__init__).parameters, *kind.attribute_map, "num_labels"]
    for key in options:
        if key not in known:
            close = get_close_matches(key, known, n=1)
            raise RecipeError(
                f"model.options.{key} is not an option",
                rule=f"a key of {kind.__name__}",
                do=f"did you mean model.options.{close[0]}?" if close else "remove it",
            )


def _made(name: str, builder: Builder, options: Mapping[str, Any]) -> torch.nn.Module:
    for key, nothing in _FETCHING.items():
        if options.get(key, nothing) != nothing:
            raise RecipeError(
                f"model.options.{key} is {options[key]!r}",
                rule="a model is built without weights, and nothing is downloaded",
                do="leave it out, and name a file of weights: model.pretrained",
            )
    try:
        return builder(**options)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"model {name!r}: {error}", rule=f"options of {name}", do="correct model.options") from error


def _library(name: str) -> Any:
    make_torchvision_importable()
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise RecipeError(
            f"model {name}:... needs {error.name}",
            rule="it is not installed with Samestep",
            do="pip install 'samestep[zoo]'",
        ) from error


def _unknown(library: str, name: str, names: Iterable[str], rule: str) -> RecipeError:
    close = get_close_matches(name, list(names), n=1)
    do = f"did you mean {library}:{close[0]}?" if close else "look at the list"
    return RecipeError(f"{library} has no model {name!r}", rule=rule, do=do)
