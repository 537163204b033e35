# expect: divided
# needs: lightning torchmetrics
# limit: 180
# imports: lightning torchmetrics
# environment: hidden
# A LightningModule with metrics, clipping and a schedule; the network inside is divided.
import logging
import warnings

import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from common import images, report
from torch import nn
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Classifier(L.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=5)
        self.losses = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("loss", loss, on_epoch=True)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        out = self(x)
        self.accuracy(out, y)
        self.log("accuracy", self.accuracy, on_epoch=True)
        self.log("validation_loss", F.cross_entropy(out, y))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)]


net = nn.Sequential(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(384, 5))
# + net = samestep.parallel(net)
model = Classifier(net)
trainer = L.Trainer(
    max_epochs=3,
    accelerator="cpu",
    devices=1,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    gradient_clip_val=1.0,
)
trainer.fit(model, DataLoader(images(96), 24, shuffle=True), DataLoader(images(96), 50))
metrics = [float(value) for name, value in sorted(trainer.callback_metrics.items())]
report(model.losses + metrics, net)
