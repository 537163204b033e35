"""Usage: `python with_lightning.py OUTPUT --processes N`."""

from pathlib import Path

import digits_task as task
import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics import SumMetric
from torchmetrics.classification import MulticlassAccuracy

Batch = tuple[torch.Tensor, torch.Tensor]


class Digits(lightning.LightningModule):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.net = task.build_model(dropout)
        self.accuracy = MulticlassAccuracy(task.CLASSES, average="micro")
        self.samples = SumMetric()

    def training_step(self, batch: Batch, index: int) -> torch.Tensor:
        inputs, targets = batch
        return nn.functional.cross_entropy(self.net(inputs), targets)

    def validation_step(self, batch: Batch, index: int) -> None:
        inputs, targets = batch
        self.accuracy.update(self.net(inputs), targets)
        self.samples.update(len(targets))
        self.log("accuracy", self.accuracy)
        self.log("samples", self.samples)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return task.build_optimizer(self)


def train(output: Path, dropout: float, processes: int) -> None:
    lightning.seed_everything(task.SEED, workers=True, verbose=False)
    training, held_out = task.build_datasets()
    batch_size = task.BATCH_SIZE // processes
    model = Digits(dropout)
    trainer = lightning.Trainer(
        max_epochs=task.EPOCHS,
        accelerator="cpu",
        devices=processes,
        strategy="ddp",
        deterministic=True,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(training, batch_size=batch_size, shuffle=True))
    steps = trainer.global_step
    [values] = trainer.validate(model, DataLoader(held_out, batch_size=batch_size), verbose=False)
    if trainer.is_global_zero:
        samples, accuracy = int(values["samples"]), values["accuracy"]
        task.report(output, model.net, processes=trainer.world_size, steps=steps, samples=samples, accuracy=accuracy)


if __name__ == "__main__":
    options = task.parse()
    for dropout in options.dropout:
        train(options.output, dropout, options.processes)
