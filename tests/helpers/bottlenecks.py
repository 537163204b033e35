"""Data, model and loss with options that plant one large bottleneck each."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import nn

from samestep import Loss
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
        compute: additional products of 256 x 256 matrices in a forward.
        layers: number of consecutive small layers.
        frozen: size of a parameter that is saved and never trained.
        late_rank: rank that sleeps for `seconds` in each forward.
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
    """Return the cross entropy after all-reduces, as code that logs it would."""
    total = nn.functional.cross_entropy(outputs, targets, reduction="sum")
    for _ in range(times):
        dist.all_reduce(torch.full((20_000,), float(total.detach())))
    return Loss(total, len(targets))
