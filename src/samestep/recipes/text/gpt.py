"""A decoder of the shape of GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019)."""

from __future__ import annotations

import math

import torch
from torch import fx, nn
from torch.nn import functional

from samestep.errors import InputError, RecipeError

_STD = 0.02  # of initial weights


class GPT(nn.Module):
    """Token and position embeddings, blocks of causal attention and two layers, a norm; the output layer's weights are
    those of the token embedding (Press & Wolf, "Using the Output Embedding to Improve Language Models", 2017).

    Args:
        num_classes: number of different tokens.
        width: features of a token.
        heads: of each attention; they share the width.
        blocks: how many.
        context: the most tokens that are looked at.
        dropout: probability, of embeddings, attention and what each block adds.
        fused: attention by torch's `scaled_dot_product_attention`, which needs less memory.
    """

    def __init__(
        self,
        num_classes: int = 257,
        width: int = 128,
        heads: int = 4,
        blocks: int = 4,
        context: int = 64,
        dropout: float = 0.0,
        fused: bool = False,
    ) -> None:
        super().__init__()
        if width % heads:
            raise RecipeError(
                f"model.options: width is {width} and heads are {heads}",
                rule="heads share the width evenly",
                do=f"width: {heads * max(1, round(width / heads))}",
            )
        self.context = context
        self.tokens, self.positions = nn.Embedding(num_classes, width), nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(_Block(width, heads, dropout, fused) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.apply(_begin)
        for block in self.blocks:
            assert isinstance(block, _Block)
            for layer in (block.joined, block.narrowed):  # 2 x blocks of them add up
                nn.init.normal_(layer.weight, std=_STD / math.sqrt(2 * blocks))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits `(N, num_classes, T)` of the token after each of `(N, T)`.

        Padding stands at the end, where no earlier place looks, so it needs no mask.

        Raises:
            InputError: there are more tokens than `context`.
        """
        places = _places(tokens, self.context)
        features = self.norm(self.blocks(self.dropout(self.tokens(tokens) + self.positions(places))))
        return functional.linear(features, self.tokens.weight).transpose(1, 2)


def gpt2(
    num_classes: int = 50_257,
    width: int = 768,
    heads: int = 12,
    blocks: int = 12,
    context: int = 1024,
    dropout: float = 0.1,
    fused: bool = True,
) -> GPT:
    """A `GPT` of the sizes of the smallest GPT-2: 124 million parameters."""
    return GPT(num_classes, width, heads, blocks, context, dropout, fused)


class _Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = heads, fused
        self.attention_norm, self.layers_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mixed, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widened, self.narrowed = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        features = features + self.dropout(self._attend(self.attention_norm(features)))
        hidden = functional.gelu(self.widened(self.layers_norm(features)), approximate="tanh")
        added: torch.Tensor = self.dropout(self.narrowed(hidden))
        return features + added

    def _attend(self, features: torch.Tensor) -> torch.Tensor:
        texts, length, width = features.shape
        shape = (texts, length, self.heads, width // self.heads)
        query, key, value = (part.view(shape).transpose(1, 2) for part in self.mixed(features).chunk(3, dim=2))
        probability = self.dropout.p if self.training else 0.0
        if self.fused:
            found = functional.scaled_dot_product_attention(query, key, value, dropout_p=probability, is_causal=True)
        else:
            found = _attention(query, key, value, probability)
        joined: torch.Tensor = self.joined(found.transpose(1, 2).reshape(features.shape))
        return joined


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> torch.Tensor:
    """Causal attention written out: of products and sums alone, whose kernels are deterministic on every device."""
    length = query.shape[2]
    scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[3])
    later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    attention = functional.softmax(scores.masked_fill(later, float("-inf")), dim=3)
    return functional.dropout(attention, dropout, training=dropout > 0) @ value


def _places(tokens: torch.Tensor, context: int) -> torch.Tensor:
    """The numbers of the places of `(N, T)` tokens."""
    length = tokens.shape[1]
    if length > context:
        raise InputError(
            f"{length} tokens in a row, but the model looks at {context}",
            rule="data.options.context <= model.options.context",
            do=f"set model.options.context: {length}",
        )
    return torch.arange(length, device=tokens.device)


fx.wrap("_places")  # where a model is cut into stages, a condition on a size cannot be followed


def _begin(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=_STD)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)
