"""Preparation and loop of the audited scripts with Accelerate."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from parts import dataset, model
from torch import nn
from torch.utils.data import DataLoader


def start(**options: Any) -> tuple[Accelerator, nn.Module, torch.optim.Optimizer, DataLoader]:
    accelerator = Accelerator(cpu=True, **options)
    set_seed(0)
    net = model(nn.BatchNorm1d(16), nn.Dropout(0.2))
    set_seed(0, device_specific=True)
    return accelerator, net, torch.optim.AdamW(net.parameters(), lr=0.01), DataLoader(dataset(), 8, shuffle=True)


def train(accelerator: Accelerator, net: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> None:
    for _ in range(2):
        train_one_epoch(accelerator, net, optimizer, loader)


def train_one_epoch(
    accelerator: Accelerator, net: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader, schedule: Any = None
) -> None:
    net.train()
    for inputs, targets in loader:
        with accelerator.accumulate(net):
            accelerator.backward(F.cross_entropy(net(inputs), targets))
            optimizer.step()
            if schedule is not None:
                schedule.step()
            optimizer.zero_grad()


@torch.no_grad()
def count_gathered(accelerator: Accelerator, net: nn.Module, validation: DataLoader) -> tuple[int, int]:
    """Evaluate; return the number of right predictions, and of samples, without the padding."""
    net.eval()
    right = count = 0
    for inputs, targets in validation:
        outputs, labels = accelerator.gather_for_metrics((net(inputs).argmax(1), targets))
        right += int((outputs == labels).sum())
        count += len(labels)
    return right, count


def end(accelerator: Accelerator) -> None:
    accelerator.wait_for_everyone()
    accelerator.end_training()
