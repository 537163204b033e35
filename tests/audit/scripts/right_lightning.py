"""Trainer with ddp, accumulation, validation, and its checkpoints."""

import os

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from parts import dataset, model
from torch import nn
from torch.utils.data import DataLoader


class Net(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = model(nn.BatchNorm1d(16), nn.Dropout(0.2))

    def training_step(self, batch, _):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, _):
        self.log("accuracy", (self.net(batch[0]).argmax(1) == batch[1]).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2)]


torch.manual_seed(int(os.environ["RANK"]))
trainer = Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=2,
    accumulate_grad_batches=2,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Net(), DataLoader(dataset(), 8, shuffle=True), DataLoader(dataset(37), 8))
trainer.strategy.barrier()
