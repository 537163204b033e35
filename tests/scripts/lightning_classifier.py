"""Image classifier with Lightning's Trainer: metrics, validation, best checkpoint, early stopping and a CSV log."""

import csv
import logging
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

CLASSES = 5


class PatternImages(L.LightningDataModule):
    def __init__(self, batch_size=32):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage=None):
        generator = torch.Generator().manual_seed(0)
        patterns = torch.randn(CLASSES, 1, 4, 4, generator=generator)
        labels = torch.randint(0, CLASSES, (300,), generator=generator)
        images = F.interpolate(patterns[labels], size=16) + torch.randn(300, 1, 16, 16, generator=generator)
        self.train, self.val = random_split(TensorDataset(images, labels), [220, 80], generator=generator)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.val, batch_size=self.batch_size)


class Classifier(L.LightningModule):
    def __init__(self, lr=2e-3):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(2),
            nn.Flatten(),
            nn.Dropout(0.2),
            nn.Linear(128, CLASSES),
        )
        self.train_accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.val_accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.val_f1 = MulticlassF1Score(CLASSES)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.train_accuracy(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("train_acc", self.train_accuracy, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.val_accuracy(logits, y)
        self.val_f1.update(logits, y)
        self.log("val_loss", F.cross_entropy(logits, y), prog_bar=True)
        self.log("val_acc", self.val_accuracy, prog_bar=True)

    def on_validation_epoch_end(self):
        self.log("val_f1", self.val_f1.compute())
        self.val_f1.reset()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def main():
    L.seed_everything(42)
    model = Classifier()
    data = PatternImages()
    checkpoint = ModelCheckpoint(monitor="val_loss", save_top_k=1, filename="best-{epoch}")
    stopping = EarlyStopping(monitor="val_loss", patience=2)
    logger = CSVLogger("logs", name="classifier")
    trainer = L.Trainer(
        max_epochs=4,
        accelerator="cpu",
        devices=1,
        logger=logger,
        callbacks=[checkpoint, stopping],
        log_every_n_steps=2,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, data)
    print("steps", trainer.global_step, "epochs", trainer.current_epoch)
    for name, value in sorted(trainer.callback_metrics.items()):
        print(f"{name} {value.item():.4f}")
    print("best", Path(checkpoint.best_model_path).name, f"{checkpoint.best_model_score.item():.4f}")

    best = Classifier.load_from_checkpoint(checkpoint.best_model_path)
    print("validated again", [f"{v:.4f}" for v in trainer.validate(best, data, verbose=False)[0].values()])
    with open(Path(logger.log_dir) / "metrics.csv", newline="") as file:
        for row in csv.DictReader(file):
            if row["val_loss"]:
                print("epoch", row["epoch"], "step", row["step"], f"{float(row['val_loss']):.4f}")


if __name__ == "__main__":
    main()
