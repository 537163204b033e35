"""Text models: GPT-2, and models of the transformers library from sizes or from a local folder."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.nn import functional

from samestep.errors import InputError, RecipeError
from samestep.zoo.options import import_optional

_STD = 0.02  # of initial weights
# Fused kernels depend on type, shape and device, as in `causal_attention`.
_ATTENTION = "eager"
_FIXED = {"bos_token_id": None, "eos_token_id": None, "attn_implementation": _ATTENTION}


class GPT(nn.Module):
    """GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019).

    A decoder with causal attention and learned position embeddings. The output layer shares the weights of the token
    embedding (Press & Wolf, "Using the Output Embedding to Improve Language Models", 2017).

    Args:
        num_classes: vocabulary size.
        n_embd: embedding size.
        n_head: attention heads per block; `n_embd` is a multiple of it.
        n_layer: number of blocks.
        block_size: maximum number of tokens of an input.
        dropout: dropout probability of embeddings, attention and residual branches.
        fused: use `scaled_dot_product_attention`, which needs less memory and, on a GPU, less time.
    """

    def __init__(
        self,
        num_classes: int = 257,
        n_embd: int = 128,
        n_head: int = 4,
        n_layer: int = 4,
        block_size: int = 64,
        dropout: float = 0.0,
        fused: bool = False,
    ) -> None:
        super().__init__()
        require_divisible(n_embd, n_head, "n_embd", "n_head")
        self.block_size = block_size
        self.wte, self.wpe = nn.Embedding(num_classes, n_embd), nn.Embedding(block_size, n_embd)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(_Block(n_embd, n_head, dropout, fused) for _ in range(n_layer)))
        self.ln_f = nn.LayerNorm(n_embd)
        self.apply(_initialize)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):  # 2 * n_layer of them add to the residual stream
                nn.init.normal_(parameter, std=_STD / math.sqrt(2 * n_layer))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits `(N, num_classes, T)` of the next token for each of `tokens` `(N, T)`.

        Padding at the end of a row needs no mask: attention is causal.

        Raises:
            InputError: a row has more than `block_size` tokens.
        """
        positions = _positions(tokens, self.block_size)
        features = self.ln_f(self.blocks(self.dropout(self.wte(tokens) + self.wpe(positions))))
        return functional.linear(features, self.wte.weight).transpose(1, 2)


# The smallest GPT-2: 124 million parameters.
gpt2 = partial(GPT, num_classes=50_257, n_embd=768, n_head=12, n_layer=12, block_size=1024, dropout=0.1, fused=True)


class _Block(nn.Module):
    def __init__(self, n_embd: int, n_head: int, dropout: float, fused: bool) -> None:
        super().__init__()
        # The order of parameters decides the order of terms in the gradient norm.
        self.ln_1, self.ln_2 = nn.LayerNorm(n_embd), nn.LayerNorm(n_embd)
        self.attn = _Attention(n_embd, n_head, dropout, fused)
        self.mlp = _MLP(n_embd)
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        features = features + self.dropout(self.attn(self.ln_1(features)))
        residual: torch.Tensor = self.dropout(self.mlp(self.ln_2(features)))
        return features + residual


class _Attention(nn.Module):
    def __init__(self, n_embd: int, n_head: int, dropout: float, fused: bool) -> None:
        super().__init__()
        self.n_head, self.dropout, self.fused = n_head, dropout, fused
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        dropout = self.dropout if self.training else 0.0
        projected: torch.Tensor = self.c_proj(causal_attention(self.c_attn(features), self.n_head, dropout, self.fused))
        return projected


class _MLP(nn.Module):
    def __init__(self, n_embd: int) -> None:
        super().__init__()
        self.c_fc, self.c_proj = nn.Linear(n_embd, 4 * n_embd), nn.Linear(4 * n_embd, n_embd)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.c_proj(functional.gelu(self.c_fc(features), approximate="tanh"))
        return projected


def causal_attention(projections: torch.Tensor, heads: int, dropout: float = 0.0, fused: bool = False) -> torch.Tensor:
    """Return causal attention `(N, T, size)` of queries, keys and values `(N, T, 3 * size)`."""
    rows, length, width = projections.shape
    shape = (rows, length, heads, width // (3 * heads))
    query, key, value = (part.view(shape).transpose(1, 2) for part in projections.chunk(3, dim=2))
    if fused:
        values = functional.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
    else:
        # Under deterministic algorithms, torch's fused kernels on a GPU have a deterministic backward, but which kernel
        # computes depends on type, shape and GPU. `benchmarks/gpu.py` compares bits and time of both ways.
        scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[3])
        future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        attention = functional.softmax(scores.masked_fill(future, float("-inf")), dim=3)
        values = functional.dropout(attention, dropout, training=dropout > 0) @ value
    return values.transpose(1, 2).flatten(2)


def require_divisible(size: int, heads: int, size_option: str, heads_option: str) -> None:
    """Refuse an embedding size that is no multiple of the number of attention heads.

    Raises:
        InputError: it is not.
    """
    if size % heads:
        raise RecipeError(
            f"model.options.{size_option} is {size} and model.options.{heads_option} is {heads}",
            expected=f"{size_option} is a multiple of {heads_option}",
            fix=f"--set model.options.{size_option}={heads * max(1, round(size / heads))}",
            code="E_VALUE",
        )


def _positions(tokens: torch.Tensor, block_size: int) -> torch.Tensor:
    length = tokens.shape[1]
    if length > block_size:
        raise InputError(
            f"an input has {length} tokens and model.options.block_size is {block_size}",
            expected="data.options.block_size <= model.options.block_size",
            fix=f"--set model.options.block_size={length}",
            code="E_VALUE",
        )
    return torch.arange(length, device=tokens.device)


fx.wrap("_positions")  # tracing for pipeline stages cannot follow a condition on a size


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=_STD)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


def transformers_gpt2(
    num_classes: int = 50_257,
    n_embd: int = 768,
    n_head: int = 12,
    n_layer: int = 12,
    block_size: int = 1024,
    dropout: float = 0.1,
) -> nn.Module:
    """Return GPT-2 of transformers, from tokens `(N, T)` to logits `(N, num_classes, T)` of the next tokens."""
    transformers = _transformers()
    require_divisible(n_embd, n_head, "n_embd", "n_head")
    config = transformers.GPT2Config(
        vocab_size=num_classes,
        n_embd=n_embd,
        n_head=n_head,
        n_layer=n_layer,
        n_positions=block_size,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        **_FIXED,
    )
    base = transformers.GPT2LMHeadModel

    def forward(self: Any, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = base.forward(self, input_ids=tokens, use_cache=False).logits
        return logits.transpose(1, 2)

    model: nn.Module = _with_forward(base, forward)(config)
    return model


def _classifier(
    kind: Literal["Bert", "Roberta"],
    num_classes: int = 2,
    vocabulary: int = 258,
    padding: int = 257,
    longest: int = 512,
    width: int = 768,
    heads: int = 12,
    blocks: int = 12,
    dropout: float = 0.1,
    folder: str | None = None,
) -> nn.Module:
    """Return a text classifier of transformers, from `input_ids` and `attention_mask` to logits.

    `longest` is the maximum number of tokens of a text. `folder`, written by `save_pretrained`, has weights and sizes
    that replace the other options.
    """
    transformers = _transformers()
    base = getattr(transformers, f"{kind}ForSequenceClassification")
    sizes = {"max_position_embeddings": longest}
    if kind == "Roberta":  # its position numbers start after the number of the padding token
        sizes = {"max_position_embeddings": longest + padding + 1, "type_vocab_size": 1}
    config = getattr(transformers, f"{kind}Config")(
        num_labels=num_classes,
        vocab_size=vocabulary,
        pad_token_id=padding,
        hidden_size=width,
        intermediate_size=4 * width,
        num_attention_heads=heads,
        num_hidden_layers=blocks,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
        **_FIXED,
        **sizes,
    )

    def forward(self: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = base.forward(self, input_ids=input_ids, attention_mask=attention_mask).logits
        return logits

    cls = _with_forward(base, forward)
    if folder is not None:
        return _from_folder(cls, config, longest, Path(folder))
    require_divisible(width, heads, "width", "heads")
    model: nn.Module = cls(config)
    return model


bert = partial(_classifier, "Bert")  # Devlin et al., 2018
roberta = partial(_classifier, "Roberta")  # Liu et al., 2019


def _from_folder(cls: Any, config: Any, longest: int, folder: Path) -> nn.Module:
    try:
        saved = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise RecipeError(
            f"{folder / 'config.json'} cannot be read: {error}",
            expected="a folder written by save_pretrained",
            fix="correct model.options.folder; models are not downloaded",
            code="E_UNREADABLE",
        ) from error
    kind, vocabulary = saved.get("model_type"), saved.get("vocab_size", 0)
    positions = saved.get("max_position_embeddings", 0)
    if kind == "roberta":
        positions -= saved.get("pad_token_id", 1) + 1
    if kind != config.model_type or vocabulary < config.vocab_size or positions < longest:
        raise RecipeError(
            f"{folder} is a {kind} with {vocabulary} tokens and {positions} positions; the recipe has a "
            f"{config.model_type} with {config.vocab_size} tokens and texts of up to {longest} tokens",
            expected="a folder whose model fits the tokenizer and the length of texts",
            fix="set data.options.tokenizer to the same folder, and data.options.longest to the model's maximum",
            code="E_WEIGHTS",
        )
    try:
        model: nn.Module = cls.from_pretrained(
            str(folder),
            num_labels=config.num_labels,
            local_files_only=True,
            attn_implementation=_ATTENTION,
            dtype=torch.float32,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise RecipeError(
            f"no weights can be read from {folder}: {str(error).splitlines()[0]}",
            expected="a folder written by save_pretrained, with as many classes as the data or none",
            fix="correct model.options.folder; models are not downloaded",
            code="E_WEIGHTS",
        ) from error
    return model


def _with_forward(base: Any, forward: Callable[..., torch.Tensor]) -> Any:
    """Return a subclass of `base` with another forward; parameter names stay those of the library."""
    return type(base.__name__, (base,), {"forward": forward})


def _transformers() -> Any:
    library = import_optional("transformers", "a model of transformers")
    library.utils.logging.disable_progress_bar()  # of loading weights
    return library
