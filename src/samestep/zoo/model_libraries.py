"""Models of torchvision, timm, transformers and segmentation_models_pytorch, without downloads."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from samestep.config.key_suggestions import did_you_mean
from samestep.config.validation import require_path
from samestep.errors import RecipeError
from samestep.torchvision_import import make_torchvision_importable
from samestep.zoo.options import import_optional, takes, unknown_option

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
# Automatic class and table of class names of each kind of model of transformers.
_KINDS = {
    "image": ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
    "text": (
        "AutoModelForSequenceClassification",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    ),
    "language": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
}
# Defaults of a class are numbers of another vocabulary than that of the data.
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}


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
    return _offline(partial(builder, **no_weights), "num_classes")


def _timm_model(name: str) -> Builder:
    timm = import_optional("timm", f"model timm:{name}")
    if not timm.is_model(name):  # a name can have a tag of weights
        _require_known("timm", name, timm.list_models())
    create = partial(timm.create_model, name, pretrained=False)
    return _offline(create, "num_classes")


def _segmentation_model(name: str) -> Builder:
    kind = "segmentation_models_pytorch"
    library = import_optional(kind, f"model {kind}:{name}")
    classes = {cls.__name__: cls for cls in library.MODEL_ARCHITECTURES_MAPPING.values()}
    _require_known(kind, name, classes)
    return _offline(partial(classes[name], encoder_weights=None), "classes")


def _offline(builder: Builder, classes: str) -> Builder:
    """Return a builder that refuses downloads.

    Args:
        builder: function of the library.
        classes: the library's name of the number of classes.
    """

    def build(*, num_classes: int, **options: Any) -> torch.nn.Module:
        for key, disabled in _DOWNLOADS.items():
            if options.get(key, disabled) != disabled:
                raise RecipeError(
                    f"model.options.{key} is {options[key]!r}",
                    expected="no option that downloads weights",
                    fix=f"remove model.options.{key} and set model.pretrained to a file of weights",
                    code="E_VALUE",
                )
        return builder(**{**options, classes: num_classes})

    return build


def _require_known(library: str, name: str, names: Iterable[str]) -> None:
    known = list(names)
    if name not in known:
        fix = did_you_mean(name, known, "choose a model of the library", f"{library}:")
        expected = f"one of the {len(known)} models of {library}, such as {', '.join(known[:5])}"
        raise RecipeError(f"{library} has no model {name!r}", expected, fix, code="E_UNKNOWN_NAME")


def transformers_model(name: str) -> Builder:
    """Return the builder of a class of transformers, or of a folder with a `config.json`.

    The builder takes the number of classes, the sizes of a text dataset, and keys of the
    configuration. With `load_weights`, the weights are those of the folder.

    Raises:
        RecipeError: the library is not installed, or has no such class; or the folder has no
            configuration.
    """
    transformers = import_optional("transformers", f"model transformers:{name}")
    transformers.utils.logging.disable_progress_bar()  # of loading weights
    is_folder = "/" in name
    _require_model(name, is_folder=is_folder)

    def build(
        *,
        num_classes: int,
        vocabulary: int | None = None,
        padding: int = 0,
        longest: int = 0,
        attn_implementation: str | None = None,
        load_weights: bool = False,
        **options: Any,
    ) -> torch.nn.Module:
        text_sizes = None if vocabulary is None else (vocabulary, padding, longest)
        configure = _configure_folder if is_folder else _configure_class
        try:
            kind, config = configure(transformers, name, num_classes, text_sizes, options)
            # The configuration of a folder can name float16, in which recipes do not train.
            arguments: dict[str, Any] = {"dtype": torch.float32}
            if attn_implementation is None and kind != "image":
                attn_implementation = "eager"  # fused kernels depend on type, shape and device
            if attn_implementation is not None:
                arguments["attn_implementation"] = attn_implementation
            auto = getattr(transformers, _KINDS[kind][0])
            if load_weights:
                arguments |= {"local_files_only": True, "config": config}
                model = auto.from_pretrained(name, **arguments)
            else:
                model = auto.from_config(config, **arguments)
        except (OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise RecipeError(
                f"model 'transformers:{name}': {str(error).splitlines()[0]}",
                expected="options and a folder that fit the data; with load_weights, weights for "
                "their classes",
                fix="correct model.options, data.options.tokenizer or the folder; models are not "
                "downloaded",
                code="E_VALUE",
            ) from error

        # A wrapper module would add a prefix to the parameter names; a hook keeps the names of the
        # library.
        hook = _next_token_logits if kind == "language" else _logits
        model.register_forward_hook(hook)
        return model  # type: ignore[no-any-return]

    return build


def _require_model(name: str, *, is_folder: bool) -> None:
    if is_folder:
        require_path(
            Path(name) / "config.json",
            "file",
            "a folder of save_pretrained; models are not downloaded",
            "download the model first (hf download NAME --local-dir FOLDER), or name a class",
        )
    elif name not in (kinds := _kinds()):
        fix = did_you_mean(name, kinds, "choose a class of transformers", "transformers:")
        raise RecipeError(
            f"transformers has no model {name!r}",
            expected="a class for image or sequence classification or a causal language model; "
            "or a folder (./FOLDER)",
            fix=fix,
            code="E_UNKNOWN_NAME",
        )


def _kinds() -> dict[str, str]:
    auto = import_module("transformers.models.auto.modeling_auto")
    kinds: dict[str, str] = {}
    for kind, (_, table) in _KINDS.items():
        for value in getattr(auto, table).values():
            kinds[value if isinstance(value, str) else value[0]] = kind
    return kinds


def _configure_class(
    transformers: Any,
    name: str,
    num_classes: int,
    text_sizes: tuple[int, int, int] | None,
    options: Mapping[str, Any],
) -> tuple[str, Any]:
    """Return the kind of a class and a configuration for the data, with other sizes by default."""
    config_class = getattr(transformers, name).config_class
    _check_options(config_class, options)
    kind = _kinds()[name]
    sizes: dict[str, Any] = {"num_labels": num_classes}
    if kind == "language":
        sizes = {"vocab_size": num_classes, "use_cache": False, **_NO_TOKENS}
    elif text_sizes is not None:
        vocabulary, padding, longest = text_sizes
        sizes |= {"vocab_size": vocabulary, "pad_token_id": padding, **_NO_TOKENS}
        sizes["max_position_embeddings"] = longest
        if "roberta" in config_class.model_type:
            # Its position numbers start after the number of the padding token.
            sizes |= {"max_position_embeddings": longest + padding + 1, "type_vocab_size": 1}
    return kind, config_class(**{**sizes, **options})


def _configure_folder(
    transformers: Any,
    name: str,
    num_classes: int,
    text_sizes: tuple[int, int, int] | None,
    options: Mapping[str, Any],
) -> tuple[str, Any]:
    """Return the kind of a model and the configuration of a folder; text must fit its sizes."""
    config = transformers.AutoConfig.from_pretrained(
        name, local_files_only=True, trust_remote_code=False
    )
    _check_options(type(config), options)
    kind = "text"
    if text_sizes is None:
        kind = _kinds().get((config.architectures or [""])[0], "image")
    changes: dict[str, Any] = {"num_labels": num_classes}
    least = {}
    if text_sizes is not None:
        offset = (config.pad_token_id or 0) + 1 if "roberta" in config.model_type else 0
        least = {"vocab_size": text_sizes[0], "max_position_embeddings": text_sizes[2] + offset}
    elif kind == "language":
        changes = {"use_cache": False}
        least = {"vocab_size": num_classes}
    for key, size in least.items():
        if getattr(config, key, size) < size:
            raise ValueError(f"config.json has {key} {getattr(config, key)}; the data need {size}")
    for key, value in {**changes, **options}.items():
        setattr(config, key, value)
    return kind, config


def _check_options(config_class: Any, options: Mapping[str, Any]) -> None:
    """Refuse unknown options; the configuration classes of transformers accept any name."""
    parameters = inspect.signature(config_class.__init__).parameters
    known = [*parameters, *config_class.attribute_map, "num_labels"]
    for key in options:
        if key not in known:
            raise unknown_option("model.options", key, known)


def _logits(model: torch.nn.Module, inputs: Any, outputs: Any) -> torch.Tensor:
    logits: torch.Tensor = outputs.logits
    return logits


def _next_token_logits(model: torch.nn.Module, inputs: Any, outputs: Any) -> torch.Tensor:
    """Return logits `(N, vocabulary, T)`, as the models of this package do."""
    logits: torch.Tensor = outputs.logits
    return logits.transpose(1, 2)
