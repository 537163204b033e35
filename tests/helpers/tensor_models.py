"""Tiny models that a tensor axis divides."""

import torch
from torch import nn
from torch.nn import functional

TOKENS = 13
LENGTH = 6
DROPOUT = 0.2
PLAN = {"*.up": "column", "*.down": "row", "embed": "column_gathered", "frozen": "column_gathered", "last": "row"}


class Layers(nn.Module):
    """Batch norm, dropout of divided and of whole tensors, an embedding, a frozen layer, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(TOKENS, 16), nn.BatchNorm1d(16)
        self.blocks = nn.ModuleList([_Wide() for _ in range(2)])
        self.frozen = nn.Linear(16, 16).requires_grad_(False)
        self.last = nn.Linear(16, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.frozen(self.norm(self.embed(tokens).mean(dim=1)))
        for block in [*self.blocks, self.blocks[0]]:
            hidden = block(hidden)
        logits: torch.Tensor = self.last(hidden)
        return logits


class _Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
        self.inner, self.outer = nn.Dropout(0.3), nn.Dropout(DROPOUT)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(functional.gelu(self.up(features)))
        added: torch.Tensor = self.outer(self.down(hidden))
        return features + added


def gpt() -> nn.Module:
    from samestep.zoo.models import GPT

    return GPT(num_classes=TOKENS, n_embd=16, n_head=4, n_layer=2, block_size=LENGTH, dropout=DROPOUT)
