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
    "text": (
        "AutoModelForSequenceClassification",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    ),
    "language": ("AutoModelForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
}
_NO_TOKENS = {"bos_token_id": None, "eos_token_id": None}


def transformers_model(name: str) -> Callable[..., torch.nn.Module]:
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
    if is_folder:
        fix = "download the model first (hf download NAME --local-dir FOLDER), or name a class"
        require_path(
            Path(name) / "config.json",
            "file",
            "a folder of save_pretrained; models are not downloaded",
            fix,
        )
    elif name not in (kinds := _kinds()):
        meant = suggest(name, kinds)
        raise RecipeError(
            f"transformers has no model {name!r}",
            expected="a class for image or sequence classification or a causal language model; or a folder (./FOLDER)",
            fix="choose a class of transformers"
            if meant is None
            else f"did you mean transformers:{meant}?",
            code="E_UNKNOWN_NAME",
        )

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
            if attn_implementation is None and kind != "image":
                attn_implementation = "eager"  # fused kernels depend on type, shape and device
            arguments = (
                {} if attn_implementation is None else {"attn_implementation": attn_implementation}
            )
            auto = getattr(transformers, _KINDS[kind][0])
            if load_weights:
                create = partial(auto.from_pretrained, name, local_files_only=True, config=config)
            else:
                create = partial(auto.from_config, config)
            model: torch.nn.Module = create(dtype=torch.float32, **arguments)
        except (OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise RecipeError(
                f"model 'transformers:{name}': {str(error).splitlines()[0]}",
                expected="options and a folder that fit the data; with load_weights, weights for their classes",
                fix="correct model.options, data.options.tokenizer or the folder; models are not downloaded",
                code="E_VALUE",
            ) from error
        # A wrapper module would add a prefix to the parameter names; a hook keeps the names of the
        # library.
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
    transformers: Any,
    name: str,
    num_classes: int,
    text_sizes: tuple[int, int, int] | None,
    options: Mapping[str, Any],
) -> tuple[str, Any]:
    """Return the kind of a class and a configuration for the data, with default sizes for the other keys."""
    config_class = getattr(transformers, name).config_class
    _check_options(config_class, options)
    kind = _kinds()[name]
    sizes: dict[str, Any] = {"num_labels": num_classes}
    if kind == "language":
        sizes = {"vocab_size": num_classes, "use_cache": False, **_NO_TOKENS}
    elif text_sizes is not None:
        vocabulary, padding, longest = text_sizes
        sizes |= {
            "vocab_size": vocabulary,
            "pad_token_id": padding,
            "max_position_embeddings": longest,
            **_NO_TOKENS,
        }
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
    kind = (
        "text"
        if text_sizes is not None
        else _kinds().get((config.architectures or [""])[0], "image")
    )
    changes: dict[str, Any] = (
        {"use_cache": False} if kind == "language" else {"num_labels": num_classes}
    )
    least = {"vocab_size": num_classes if kind == "language" else 0}
    if text_sizes is not None:
        offset = (config.pad_token_id or 0) + 1 if "roberta" in config.model_type else 0
        least = {"vocab_size": text_sizes[0], "max_position_embeddings": text_sizes[2] + offset}
    for key, size in least.items():
        if getattr(config, key, size) < size:
            raise ValueError(f"config.json has {key} {getattr(config, key)}; the data need {size}")
    for key, value in {**changes, **options}.items():
        setattr(config, key, value)
    return kind, config


def _check_options(config_class: Any, options: Mapping[str, Any]) -> None:
    """Refuse unknown options; the configuration classes of transformers accept any name."""
    known = [
        *inspect.signature(config_class.__init__).parameters,
        *config_class.attribute_map,
        "num_labels",
    ]
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
