"""The model and the data of every start-up script, and the mark of rank 0 after its first step."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

BATCH_SIZE = 64  # over all processes
SAMPLES = 512
CLASSES = 10


def build_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, CLASSES),
    )


def build_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def build_dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(SAMPLES, 3, 32, 32, generator=generator)
    return TensorDataset(images, torch.randint(CLASSES, (SAMPLES,), generator=generator))


def first_step_done(mark: str, processes: int) -> None:
    """Write the time, and the number of processes as this one knows it, where the benchmark looks for them."""
    now = time.time()
    Path(mark).write_text(f"{now} {processes}")
