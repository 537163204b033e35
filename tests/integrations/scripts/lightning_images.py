"""Image classification in the form of Lightning's examples: a data module, all four loops, the best checkpoint."""

import sys

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split


class Backbone(nn.Module):
    def __init__(self, hidden=32):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Dropout(0.1))
        self.head = nn.Linear(hidden, 10)

    def forward(self, images):
        return self.head(self.layers(images))


class Classifier(LightningModule):
    def __init__(self, backbone=None, learning_rate=0.01):
        super().__init__()
        self.save_hyperparameters(ignore=["backbone"])
        self.backbone = Backbone() if backbone is None else backbone

    def forward(self, images):
        return self.backbone(images)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("valid_loss", F.cross_entropy(self(images), labels), on_step=True, on_epoch=True)

    def test_step(self, batch, batch_idx):
        images, labels = batch
        outputs = self(images)
        self.log("test_loss", F.cross_entropy(outputs, labels))
        self.log("test_accuracy", (outputs.argmax(1) == labels).float().mean())

    def predict_step(self, batch, batch_idx, dataloader_idx=None):
        return self(batch[0])

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=self.hparams.learning_rate)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Digits(LightningDataModule):
    def __init__(self, batch_size=32):
        super().__init__()
        self.batch_size = batch_size

    def setup(self, stage):
        images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
        data = TensorDataset(images.float().view(-1, 1, 8, 8) / 16, labels)
        generator = torch.Generator().manual_seed(42)
        self.train, self.valid, self.test = random_split(data, [1297, 250, 250], generator=generator)

    def train_dataloader(self):
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, num_workers=1)

    def val_dataloader(self):
        return DataLoader(self.valid, batch_size=self.batch_size)

    def test_dataloader(self):
        return DataLoader(self.test, batch_size=self.batch_size)

    def predict_dataloader(self):
        return DataLoader(self.test, batch_size=self.batch_size)


if __name__ == "__main__":
    seed_everything(1234)
    callbacks = [ModelCheckpoint(monitor="valid_loss"), LearningRateMonitor()]
    options = {"accelerator": "cpu", "devices": int(sys.argv[1]), "log_every_n_steps": 5}
    trainer = Trainer(max_epochs=2, callbacks=callbacks, **options)
    model, data = Classifier(), Digits()
    trainer.fit(model, datamodule=data)
    trainer.test(ckpt_path="best", datamodule=data)
    predictions = torch.cat(trainer.predict(ckpt_path="best", datamodule=data))
    trainer.print("predictions", len(predictions), float(predictions.double().sum()))
