"""Data with a loading time and a model with large activations, for tests of `samestep tune`."""

import os
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import get_worker_info

from samestep.zoo.splits import Splits


class Waiting:
    """Images that take `seconds` to load, as from a disk; more than `most_workers` workers exit."""

    def __init__(self, samples: int, seconds: float, size: int, most_workers: int, slow_rank: int | None) -> None:
        self._images = torch.randn(samples, 3, size, size, generator=torch.Generator().manual_seed(0))
        is_slow = slow_rank is None or not dist.is_initialized() or dist.get_rank() == slow_rank
        self._seconds, self._most_workers = seconds if is_slow else 0.0, most_workers

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        worker = get_worker_info()
        if worker is not None and worker.num_workers > self._most_workers:
            os._exit(1)
        time.sleep(self._seconds)
        return self._images[index] + 0.1 * torch.randn(1), index % 2


def load(
    *, samples: int = 64, seconds: float = 0.0, size: int = 8, most_workers: int = 99, slow_rank: int | None = None
) -> Splits:
    """Return training images, and a few for evaluation; with `slow_rank`, they are slow on this rank only."""
    train = Waiting(samples, seconds, size, most_workers, slow_rank)
    return Splits(train=train, evaluation=Waiting(8, 0.0, size, most_workers, None), classes=("a", "b"))


class Wide(nn.Sequential):
    """Model with few weights and activations of 256 KiB per channel for an image of 256 x 256 pixels."""

    def __init__(self, num_classes: int = 2, width: int = 64) -> None:
        super().__init__(nn.Conv2d(3, width, 1), nn.BatchNorm2d(width), nn.ReLU(), nn.Dropout(0.1))
        self.extend([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes)])
