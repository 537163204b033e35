"""Data and a model for the benchmark of `samestep tune`: options set the cause and the place of the time."""

from __future__ import annotations

import time

import torch
from torch import nn

from samestep.zoo.splits import Splits


class Slow:
    """Small images that take their time.

    Args:
        wait: seconds that a sample waits, as for a disk.
        work: seconds of processor time that it costs.
    """

    def __init__(self, count: int, wait: float, work: float) -> None:
        self._images = torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        self._wait, self._work = wait, work

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if self._wait:
            time.sleep(self._wait)
        end = time.thread_time() + self._work
        while time.thread_time() < end:
            pass
        return self._images[index], index % 2


def load(*, wait: float = 0.0, work: float = 0.0) -> Splits:
    """Samples to train on, and a few to evaluate on."""
    return Splits(train=Slow(8192, wait, work), evaluation=Slow(64, 0.0, 0.0), classes=("a", "b"))


class Net(nn.Sequential):
    """A small convolution.

    Args:
        wait: seconds that a forward also waits, as for a device.
    """

    def __init__(self, wait: float = 0.0, width: int = 16) -> None:
        super().__init__(nn.Conv2d(3, width, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 2))
        self._wait = wait

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Logits `(N, 2)` of images `(N, 3, H, W)`."""
        if self._wait:
            time.sleep(self._wait)
        logits: torch.Tensor = super().forward(images)
        return logits
