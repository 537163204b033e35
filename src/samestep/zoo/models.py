"""Models of recipes: U-Nets, GPT-2, and a small language model.

All kernels of the U-Nets (Ronneberger et al., 2015) are deterministic on GPUs. Upsampling takes the
nearest pixel or is a transposed convolution, because linear interpolation has no deterministic
backward on GPUs.
"""

from __future__ import annotations

import math
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional

from samestep.errors import InputError
from samestep.zoo.model_libraries import find_in_library

_STD = 0.02  # of initial weights


class GPT(nn.Module):
    """GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019).

    A decoder with causal attention and learned position embeddings. The output layer shares the
    weights of the token embedding (Press & Wolf, "Using the Output Embedding to Improve Language
    Models", 2017).

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
        require_divisible(n_embd, n_head)
        self.block_size = block_size
        self.wte = nn.Embedding(num_classes, n_embd)
        self.wpe = nn.Embedding(block_size, n_embd)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(
            *(_GPTBlock(n_embd, n_head, dropout, fused) for _ in range(n_layer))
        )
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
        # Not a layer with the same weight, which state dicts would have under two names.
        return functional.linear(features, self.wte.weight).transpose(1, 2)


# The smallest GPT-2: 124 million parameters.
gpt2 = partial(
    GPT,
    num_classes=50_257,
    n_embd=768,
    n_head=12,
    n_layer=12,
    block_size=1024,
    dropout=0.1,
    fused=True,
)


class _GPTBlock(nn.Module):
    def __init__(self, n_embd: int, n_head: int, dropout: float, fused: bool) -> None:
        super().__init__()
        # The order of parameters decides the order of terms in the gradient norm.
        self.ln_1 = nn.LayerNorm(n_embd)
        self.ln_2 = nn.LayerNorm(n_embd)
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
        self.n_head = n_head
        self.dropout = dropout
        self.fused = fused
        self.c_attn = nn.Linear(n_embd, 3 * n_embd)
        self.c_proj = nn.Linear(n_embd, n_embd)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        dropout = self.dropout if self.training else 0.0
        attended = causal_attention(self.c_attn(features), self.n_head, dropout, self.fused)
        projected: torch.Tensor = self.c_proj(attended)
        return projected


class _MLP(nn.Module):
    def __init__(self, n_embd: int) -> None:
        super().__init__()
        self.c_fc = nn.Linear(n_embd, 4 * n_embd)
        self.c_proj = nn.Linear(4 * n_embd, n_embd)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = functional.gelu(self.c_fc(features), approximate="tanh")
        projected: torch.Tensor = self.c_proj(hidden)
        return projected


def causal_attention(
    projections: torch.Tensor, heads: int, dropout: float = 0.0, fused: bool = False
) -> torch.Tensor:
    """Return causal attention `(N, T, size)` of queries, keys and values `(N, T, 3 * size)`."""
    rows, length, width = projections.shape
    shape = (rows, length, heads, width // (3 * heads))
    query, key, value = (part.view(shape).transpose(1, 2) for part in projections.chunk(3, dim=2))
    if fused:
        values = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True
        )
    else:
        # Under deterministic algorithms, torch's fused kernels on a GPU have a deterministic
        # backward, but which kernel computes depends on type, shape and GPU. `benchmarks/gpu.py`
        # compares bits and time of both ways.
        scores = query @ key.transpose(2, 3) / math.sqrt(query.shape[3])
        future = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
        attention = functional.softmax(scores.masked_fill(future, float("-inf")), dim=3)
        # By the probability: the caller passes 0 in evaluation.
        values = functional.dropout(attention, dropout, training=dropout > 0) @ value
    return values.transpose(1, 2).flatten(2)


def require_divisible(size: int, heads: int) -> None:
    """Raise `ValueError` unless an embedding size is a multiple of the number of heads."""
    if size % heads:
        raise ValueError(f"the size {size} is no multiple of {heads} heads")


def _positions(tokens: torch.Tensor, block_size: int) -> torch.Tensor:
    length = tokens.shape[1]
    if length > block_size:
        raise InputError(
            f"an input has {length} tokens and model.options.block_size is {block_size}",
            expected="data.options.block_size <= model.options.block_size",
            fix=f"model.options.block_size={length}",
            code="E_VALUE",
        )
    return torch.arange(length, device=tokens.device)


fx.wrap("_positions")  # tracing for pipeline stages cannot follow a condition on a size


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=_STD)
    if isinstance(module, nn.Linear):
        nn.init.zeros_(module.bias)


class TokensNet(nn.Module):
    """Causal transformer with position embeddings.

    Args:
        num_classes: vocabulary size.
        width: embedding size.
        heads: attention heads per block; `width` is a multiple of it.
        blocks: number of blocks.
        dropout: dropout probability of the residual branches.
        longest: maximum number of tokens of a line.
    """

    def __init__(
        self,
        num_classes: int = 29,
        width: int = 64,
        heads: int = 4,
        blocks: int = 2,
        dropout: float = 0.1,
        longest: int = 128,
    ) -> None:
        super().__init__()
        require_divisible(width, heads)
        self.tokens = nn.Embedding(num_classes, width)
        self.positions = nn.Embedding(longest, width)
        self.blocks = nn.Sequential(*(_TokensBlock(width, heads, dropout) for _ in range(blocks)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=width**-0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return logits `(N, num_classes, T)` of the next token for each of `tokens` `(N, T)`.

        Padding at the end of a line needs no mask: attention is causal.
        """
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        logits: torch.Tensor = self.head(
            self.norm(self.blocks(self.tokens(tokens) + self.positions(positions)))
        )
        return logits.transpose(1, 2)


class _TokensBlock(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.layers_norm = nn.LayerNorm(width)
        self.mixed = nn.Linear(width, 3 * width)
        self.joined = nn.Linear(width, width)
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        mixed = self.mixed(self.attention_norm(features))
        features = features + self.dropout(self.joined(causal_attention(mixed, self.heads)))
        residual: torch.Tensor = self.dropout(self.layers(self.layers_norm(features)))
        return features + residual


def unet(num_classes: int = 1, *, encoder: str = "resnet34", **options: Any) -> nn.Module:
    """Return `Unet` of segmentation_models_pytorch with random weights.

    Args:
        num_classes: output channels.
        encoder: name of an encoder of the library.
        options: other options of the class.

    Raises:
        RecipeError: the library is not installed, or refuses an option.
    """
    build = find_in_library("segmentation_models_pytorch:Unet")
    assert build is not None
    options.setdefault("decoder_interpolation", "nearest")
    return build(num_classes=num_classes, encoder_name=encoder, **options)


unet_vgg16 = partial(unet, encoder="vgg16")
unet_resnet34 = partial(unet, encoder="resnet34")
unet_resnet101 = partial(unet, encoder="resnet101")


class UNet(nn.Module):
    """Small U-Net with batch norm, strided and transposed convolutions.

    Inputs of any size are padded with zeros at the end, and the output is cropped.

    Args:
        num_classes: output channels.
        in_channels: input channels.
        width: channels at full resolution; doubled at each level.
        levels: number of halvings of the resolution.
        dropout: dropout probability of channels at the lowest level.
    """

    def __init__(
        self,
        num_classes: int = 1,
        *,
        in_channels: int = 3,
        width: int = 16,
        levels: int = 3,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if levels < 1 or width < 1:
            raise ValueError("levels or width is less than 1")
        widths = [width * 2**level for level in range(levels + 1)]
        self.stem = _double_convolution(in_channels, widths[0])
        self.down = nn.ModuleList(
            _double_convolution(before, after, stride=2) for before, after in pairwise(widths)
        )
        self.dropout = nn.Dropout2d(dropout)
        pairs = list(pairwise(widths[::-1]))
        self.up = nn.ModuleList(
            nn.ConvTranspose2d(below, above, 2, stride=2) for below, above in pairs
        )
        self.joined = nn.ModuleList(_double_convolution(2 * above, above) for _, above in pairs)
        self.head = nn.Conv2d(widths[0], num_classes, 1)
        self._step = 2**levels

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits `(N, num_classes, H, W)` of inputs `(N, in_channels, H, W)`."""
        sides = images.shape[2:]
        # Batch norm of one sample needs at least two positions per channel at the lowest level.
        padded = [max(2, -(-side // self._step)) * self._step for side in sides]
        padding = []
        # `pad` begins with the last dimension.
        for side, size in zip(sides[::-1], padded[::-1], strict=True):
            padding += [0, size - side]
        features = [self.stem(functional.pad(images, padding))]
        for block in self.down:
            features.append(block(features[-1]))
        lowest = self.dropout(features.pop())
        for up, joined in zip(self.up, self.joined, strict=True):
            lowest = joined(torch.cat([up(lowest), features.pop()], dim=1))
        logits: torch.Tensor = self.head(lowest)
        return logits[:, :, : sides[0], : sides[1]]


def _double_convolution(before: int, after: int, stride: int = 1) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, step in ((before, stride), (after, 1)):
        layers += [
            nn.Conv2d(inputs, after, 3, stride=step, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers)
