"""Models of transformers by class or from a local folder: image classifiers, text classifiers and language models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from samestep.config.key_suggestions import suggest
from samestep.errors import RecipeError
from samestep.zoo.options import import_optional, require_path, unknown_option

# Automatic class and table of class names of each kind of model.
_KINDS = {
    "image": ("AutoModelForImageClassification", "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES"),
    "text": ("AutoModelForSequenceClassification", "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"),
    "language": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
}
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}


def transformers_model(name: str) -> Callable[..., torch.nn.Module]:
    """Return the builder of a class of transformers, or of a folder with a `config.json`.

    The builder takes the number of classes, the sizes of a text dataset, and keys of the configuration. With
    `load_weights`, the weights are those of the folder.

    Raises:
        RecipeError: the library is not installed, or has no such class; or the folder has no configuration.
    """
    transformers = import_optional("transformers", f"model transformers:{name}")
    transformers.utils.logging.disable_progress_bar()  # of loading weights
    folder = Path(name) if "/" in name else None
    configure = partial(_configure_class, transformers, name)
    if folder is not None:
        _require_config(folder)
        configure = partial(_configure_folder, transformers, folder)

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
        kind, config = configure(num_classes, text_sizes, options)
        if attn_implementation is None and kind != "image":
            attn_implementation = "eager"  # fused kernels depend on type, shape and device
        arguments = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
        auto = getattr(transformers, _KINDS[kind][0])
        if load_weights:
            create = partial(auto.from_pretrained, str(folder), local_files_only=True, config=config)
        else:
            create = partial(auto.from_config, config)
        model = _create(name, create, arguments)
        # A wrapper module would add a prefix to the parameter names; a hook keeps the names of the library.
        model.register_forward_hook(_next_token_logits if kind == "language" else _logits)
        return model

    return build


def _kinds() -> dict[str, str]:
    """Return the kind of each class of the library."""
    auto = import_module("transformers.models.auto.modeling_auto")
    kinds: dict[str, str] = {}
    for kind, (_, table) in _KINDS.items():
        for value in getattr(auto, table).values():
            kinds[value if isinstance(value, str) else value[0]] = kind
    return kinds


def _configure_class(
    transformers: Any, name: str, num_classes: int, text_sizes: tuple[int, int, int] | None, options: Mapping[str, Any]
) -> tuple[str, Any]:
    """Return the kind of a class and a configuration for the data, with default sizes for the other keys."""
    kinds = _kinds()
    if name not in kinds:
        meant = suggest(name, kinds)
        raise RecipeError(
            f"transformers has no model {name!r}",
            expected="a class for image or sequence classification or a causal language model; or a folder (./FOLDER)",
            fix="choose a class of transformers" if meant is None else f"did you mean transformers:{meant}?",
            code="E_UNKNOWN_NAME",
        )
    config_class = getattr(transformers, name).config_class
    _check_options(config_class, options)
    kind = kinds[name]
    sizes: dict[str, Any] = {"num_labels": num_classes}
    if kind == "language":
        sizes = {"vocab_size": num_classes, "use_cache": False, **_NO_TOKENS}
    elif text_sizes is not None:
        vocabulary, padding, longest = text_sizes
        sizes |= {"vocab_size": vocabulary, "pad_token_id": padding, "max_position_embeddings": longest, **_NO_TOKENS}
        if "roberta" in config_class.model_type:
            # Its position numbers start after the number of the padding token.
            sizes |= {"max_position_embeddings": longest + padding + 1, "type_vocab_size": 1}
    return kind, config_class(**{**sizes, **options})


def _configure_folder(
    transformers: Any,
    folder: Path,
    num_classes: int,
    text_sizes: tuple[int, int, int] | None,
    options: Mapping[str, Any],
) -> tuple[str, Any]:
    """Return the kind of a model and the configuration of a folder; text must fit its sizes."""
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
    architecture = (config.architectures or [""])[0]
    kind = "text" if text_sizes is not None else _kinds().get(architecture, "image")
    changes: dict[str, Any] = {"num_labels": num_classes}
    if kind == "language":
        _require_fit(config, folder, "vocab_size", num_classes)
        changes = {"use_cache": False}
    elif text_sizes is not None:
        vocabulary, _, longest = text_sizes
        _require_fit(config, folder, "vocab_size", vocabulary)
        offset = (config.pad_token_id or 0) + 1 if "roberta" in config.model_type else 0
        _require_fit(config, folder, "max_position_embeddings", longest + offset)
    for key, value in {**changes, **options}.items():
        setattr(config, key, value)
    return kind, config


def _require_config(folder: Path) -> None:
    require_path(
        folder / "config.json",
        "file",
        "a folder written by save_pretrained; models are not downloaded",
        "download the model first (hf download NAME --local-dir FOLDER), or name a class: "
        "transformers:ViTForImageClassification",
    )


def _require_fit(config: Any, folder: Path, key: str, least: int) -> None:
    value = getattr(config, key, least)
    if value < least:
        raise RecipeError(
            f"{folder / 'config.json'} has {key} {value}; the data need {least}",
            expected="a model that fits the tokenizer and the length of texts",
            fix="set data.options.tokenizer to the same folder, and data.options.longest to the model's maximum",
            code="E_WEIGHTS",
        )


def _create(name: str, create: Callable[..., torch.nn.Module], arguments: Mapping[str, Any]) -> torch.nn.Module:
    try:
        return create(dtype=torch.float32, **arguments)
    except (OSError, TypeError, ValueError, RuntimeError) as error:
        raise RecipeError(
            f"model 'transformers:{name}': {str(error).splitlines()[0]}",
            expected="options of the model; with load_weights, a folder with weights for the classes of the data",
            fix="correct model.options; models are not downloaded",
            code="E_VALUE",
        ) from error


def _check_options(config_class: Any, options: Mapping[str, Any]) -> None:
    """Refuse unknown options; the configuration classes of transformers accept any name."""
    known = [*inspect.signature(config_class.__init__).parameters, *config_class.attribute_map, "num_labels"]
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
