"""Start and loop of the audited scripts with Fabric."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from lightning.fabric import Fabric
from parts import dataset, model
from torch import nn
from torch.utils.data import DataLoader


def start() -> tuple[Fabric, nn.Module, torch.optim.Optimizer, DataLoader]:
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp")
    fabric.launch()
    torch.manual_seed(fabric.global_rank)
    net = model(nn.Dropout(0.2))
    return fabric, net, torch.optim.SGD(net.parameters(), lr=0.1), DataLoader(dataset(), 8, shuffle=True)


def train(fabric: Fabric, net: nn.Module, optimizer: torch.optim.Optimizer, loader: DataLoader) -> None:
    """Train one epoch."""
    net.train()
    for inputs, targets in loader:
        optimizer.zero_grad()
        fabric.backward(F.cross_entropy(net(inputs), targets))
        optimizer.step()
