"""Models of the transformers library for text: from sizes, or from a folder that it wrote. Nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from samestep.errors import RecipeError
from samestep.runtime.vision import make_torchvision_importable

# Written out, because the fused kernels for attention have no deterministic backward on every device.
_ATTENTION = "eager"


def bert(
    num_classes: int = 2,
    vocabulary: int = 258,
    padding: int = 257,
    longest: int = 512,
    width: int = 768,
    heads: int = 12,
    blocks: int = 12,
    dropout: float = 0.1,
    folder: str | None = None,
) -> torch.nn.Module:
    """BERT (Devlin et al., 2018) with a layer for classes; from `input_ids` and `attention_mask` to logits.

    Args:
        vocabulary: number of different tokens.
        padding: the token that fills up.
        longest: tokens of the longest text.
        folder: weights and sizes are those of this folder; sizes given here do not count then.
    """
    transformers = _transformers()
    sizes = _sizes(num_classes, vocabulary, padding, width, heads, blocks, dropout)
    config = transformers.BertConfig(**sizes, max_position_embeddings=longest)
    return _classifier(transformers.BertForSequenceClassification, config, longest, folder)


def roberta(
    num_classes: int = 2,
    vocabulary: int = 258,
    padding: int = 257,
    longest: int = 512,
    width: int = 768,
    heads: int = 12,
    blocks: int = 12,
    dropout: float = 0.1,
    folder: str | None = None,
) -> torch.nn.Module:
    """RoBERTa (Liu et al., 2019), as `bert`."""
    transformers = _transformers()
    sizes = _sizes(num_classes, vocabulary, padding, width, heads, blocks, dropout)
    # Its places are counted from the number of the padding token on.
    config = transformers.RobertaConfig(**sizes, max_position_embeddings=longest + padding + 1, type_vocab_size=1)
    return _classifier(transformers.RobertaForSequenceClassification, config, longest, folder)


def gpt2(
    num_classes: int = 50_257,
    width: int = 768,
    heads: int = 12,
    blocks: int = 12,
    context: int = 1024,
    dropout: float = 0.1,
) -> torch.nn.Module:
    """The transformers library's GPT-2; from tokens `(N, T)` to logits `(N, num_classes, T)` of the next ones."""
    transformers = _transformers()
    _require_even(width, heads)
    config = transformers.GPT2Config(
        vocab_size=num_classes,
        n_embd=width,
        n_head=heads,
        n_layer=blocks,
        n_positions=context,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation=_ATTENTION,
    )

    def forward(self: Any, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = base.forward(self, input_ids=tokens, use_cache=False).logits
        return logits.transpose(1, 2)

    base = transformers.GPT2LMHeadModel
    model: torch.nn.Module = _with_forward(base, forward)(config)
    return model


def _classifier(base: Any, config: Any, longest: int, folder: str | None) -> torch.nn.Module:
    def forward(self: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = base.forward(self, input_ids=input_ids, attention_mask=attention_mask).logits
        return logits

    kind = _with_forward(base, forward)
    if folder is None:
        _require_even(config.hidden_size, config.num_attention_heads)
        model: torch.nn.Module = kind(config)
        return model
    return _from_folder(kind, config, longest, Path(folder))


def _from_folder(kind: Any, config: Any, longest: int, folder: Path) -> torch.nn.Module:
    given = _config_of(folder)
    places = given.get("max_position_embeddings", 0) - (
        given.get("pad_token_id", 1) + 1 if config.model_type == "roberta" else 0
    )
    kind_given, vocabulary = given.get("model_type"), given.get("vocab_size", 0)
    if kind_given != config.model_type or vocabulary < config.vocab_size or places < longest:
        raise RecipeError(
            f"{folder} is a {kind_given} of {vocabulary} tokens for texts of at most {places} tokens; the recipe has a "
            f"{config.model_type}, {config.vocab_size} tokens, and texts of at most {longest}",
            rule="a model's folder goes with its own tokenizer",
            do="set data.options.tokenizer to the same folder, and data.options.longest to what the model takes",
        )
    try:
        model: torch.nn.Module = kind.from_pretrained(
            str(folder),
            num_labels=config.num_labels,
            local_files_only=True,
            attn_implementation=_ATTENTION,
            dtype=torch.float32,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise RecipeError(
            f"no weights can be read from {folder}: {str(error).splitlines()[0]}",
            rule="a folder that save_pretrained wrote, whose classes are as many as the data's, or none",
            do="look at model.options.folder; nothing is downloaded",
        ) from error
    return model


def _config_of(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"{folder / 'config.json'} cannot be read: {error}",
            rule="a folder that save_pretrained wrote",
            do="look at model.options.folder; nothing is downloaded",
        ) from error
    return found


def _with_forward(base: Any, forward: Callable[..., torch.Tensor]) -> Any:
    """`base` with another forward: names of parameters stay the library's own, and so its tools read checkpoints."""
    return type(base.__name__, (base,), {"forward": forward})


def _sizes(
    num_classes: int, vocabulary: int, padding: int, width: int, heads: int, blocks: int, dropout: float
) -> dict[str, Any]:
    """Sizes by the names that BERT and RoBERTa share."""
    return {
        "num_labels": num_classes,
        "vocab_size": vocabulary,
        "pad_token_id": padding,
        "hidden_size": width,
        "intermediate_size": 4 * width,
        "num_attention_heads": heads,
        "num_hidden_layers": blocks,
        "hidden_dropout_prob": dropout,
        "attention_probs_dropout_prob": dropout,
        "bos_token_id": None,
        "eos_token_id": None,
        "attn_implementation": _ATTENTION,
    }


def _require_even(width: int, heads: int) -> None:
    if width % heads:
        raise RecipeError(
            f"model.options: width is {width} and heads are {heads}",
            rule="heads share the width evenly",
            do=f"width: {heads * max(1, round(width / heads))}",
        )


def _transformers() -> Any:
    make_torchvision_importable()
    try:
        import transformers as found
    except ImportError as error:
        raise RecipeError(
            f"transformers cannot be imported: {error}",
            rule="models named transformers:... are those of that library",
            do="pip install 'samestep[zoo]'",
        ) from error
    library: Any = found
    library.utils.logging.disable_progress_bar()  # of loading weights
    return library
