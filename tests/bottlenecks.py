"""Recipes that lose time in one way each, planted big, and one that does not.

Every part has options by which what it loses is switched on.
"""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn

from samestep import Loss
from samestep.recipes.splits import Splits

FEATURES, CLASSES = 64, 4


class Points:
    """Points with a class each; each one takes a while to make."""

    def __init__(self, samples: int, seconds: float) -> None:
        generator = torch.Generator().manual_seed(7)
        self.inputs = torch.randn(samples, FEATURES, generator=generator)
        self.targets = self.inputs[:, :CLASSES].argmax(dim=1)
        self.seconds = seconds

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.seconds:
            time.sleep(self.seconds)
        return self.inputs[index], self.targets[index]


def load(*, samples: int = 512, seconds: float = 0.0) -> Splits:
    """The points; `seconds` is what a sample takes."""
    return Splits(train=Points(samples, seconds), evaluation=Points(16, 0.0), classes=tuple(map(str, range(CLASSES))))


class Net(nn.Module):
    """Some layers, and more of what costs time.

    Args:
        compute: products of square matrices of 256 that a forward makes besides.
        layers: tiny ones, one after another.
        frozen: numbers that are saved and never trained.
        late_rank: the rank that sleeps in each forward, for `seconds`.
    """

    def __init__(
        self, compute: int = 0, layers: int = 0, frozen: int = 0, late_rank: int = -1, seconds: float = 0.0
    ) -> None:
        super().__init__()
        self.tiny = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(layers))
        self.head = nn.Linear(FEATURES, CLASSES)
        self.compute, self.late_rank, self.seconds = compute, late_rank, seconds
        if frozen:
            self.frozen = nn.Parameter(torch.zeros(frozen), requires_grad=False)
        self._square = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == self.late_rank:
            time.sleep(self.seconds)
        for _ in range(self.compute):
            self._square @ self._square
        for layer in self.tiny:
            inputs = inputs + torch.tanh(layer(inputs))
        return self.head(inputs)


def loss_with_log(outputs: torch.Tensor, targets: torch.Tensor, times: int = 1) -> Loss:
    """Cross entropy that tells all ranks of itself, as people do to log it."""
    total = nn.functional.cross_entropy(outputs, targets, reduction="sum")
    for _ in range(times):
        told = torch.full((20_000,), float(total.detach()))
        dist.all_reduce(told)
    return Loss(total, len(targets))
