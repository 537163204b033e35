"""Data and model with options that make data or a rank slow."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn

from samestep.zoo.splits import Splits

FEATURES, CLASSES = 64, 4


class Points:
    """Points with a class each, and a loading time in seconds."""

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
    """Return the points; loading a training sample takes `seconds`."""
    return Splits(train=Points(samples, seconds), evaluation=Points(16, 0.0), classes=tuple(map(str, range(CLASSES))))


class Net(nn.Module):
    """Linear classifier with bottlenecks.

    Args:
        layers: number of consecutive small layers.
        late_rank: rank that sleeps for `seconds` in each forward.
    """

    def __init__(self, layers: int = 0, late_rank: int = -1, seconds: float = 0.0) -> None:
        super().__init__()
        self.tiny = nn.ModuleList(nn.Linear(FEATURES, FEATURES) for _ in range(layers))
        self.head = nn.Linear(FEATURES, CLASSES)
        self.late_rank = late_rank
        self.seconds = seconds

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == self.late_rank:
            time.sleep(self.seconds)
        for layer in self.tiny:
            inputs = inputs + torch.tanh(layer(inputs))
        return self.head(inputs)
