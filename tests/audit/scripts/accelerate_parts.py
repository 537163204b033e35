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
        for inputs, targets in loader:
            with accelerator.accumulate(net):
                accelerator.backward(F.cross_entropy(net(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()


def end(accelerator: Accelerator) -> None:
    accelerator.wait_for_everyone()
    accelerator.end_training()
