"""Module and Trainer of the audited scripts with Lightning."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from parts import dataset, model
from torch import nn
from torch.utils.data import DataLoader


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = model(nn.BatchNorm1d(16), nn.Dropout(0.2))

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2)]


def seed() -> None:
    torch.manual_seed(int(os.environ["RANK"]))


def fit(net: LightningModule, validation: int = 38, **options: Any) -> Trainer:
    """Train with validation over a number of samples."""
    settings = {"accelerator": "cpu", "devices": 2, "strategy": "ddp", "max_epochs": 2, "logger": False}
    silent = {"enable_progress_bar": False, "enable_model_summary": False}
    trainer = Trainer(**{**settings, **silent, **options})
    trainer.fit(net, DataLoader(dataset(), 8, shuffle=True), DataLoader(dataset(validation), 8))
    return trainer
