"""Lightning with accumulated gradients, clipping, one-cycle learning rate and predictions from the last checkpoint."""

import logging
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Waves(Dataset):
    """Noisy sine waves [length, 1] and their frequency."""

    def __init__(self, count, length=24):
        generator = torch.Generator().manual_seed(3)
        self.frequencies = torch.rand(count, generator=generator) * 2 + 0.5
        self.noise = 0.1 * torch.randn(count, length, generator=generator)
        self.time = torch.linspace(0, 3, length)

    def __len__(self):
        return len(self.frequencies)

    def __getitem__(self, index):
        wave = torch.sin(self.frequencies[index] * self.time) + self.noise[index]
        return {"wave": wave.unsqueeze(-1), "frequency": self.frequencies[index]}


class Regressor(L.LightningModule):
    def __init__(self, hidden=64, max_lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        self.lstm = nn.LSTM(1, hidden, num_layers=2, batch_first=True, dropout=0.1)
        self.head = nn.Linear(hidden, 1)

    def forward(self, wave):
        hidden, _ = self.lstm(wave)
        return self.head(hidden[:, -1]).squeeze(-1)

    def training_step(self, batch, batch_idx):
        loss = F.smooth_l1_loss(self(batch["wave"]), batch["frequency"])
        self.log("loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_mae", F.l1_loss(self(batch["wave"]), batch["frequency"]))

    def predict_step(self, batch, batch_idx):
        return self(batch["wave"])

    def on_before_optimizer_step(self, optimizer):
        norms = [p.grad.norm() for p in self.parameters() if p.grad is not None]
        self.log("grad_norm", torch.stack(norms).norm())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=self.hparams.max_lr, total_steps=int(self.trainer.estimated_stepping_batches)
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Printer(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            print(f"step {trainer.global_step}: loss {outputs['loss'].item():.4f} rate {rate:.6f}")


def make_trainer(epochs, callbacks):
    return L.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        devices=1,
        accumulate_grad_batches=3,
        gradient_clip_val=1.0,
        logger=CSVLogger("logs", name="accumulation"),
        callbacks=[Printer(), LearningRateMonitor("step"), *callbacks],
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def main():
    L.seed_everything(1)
    data = Waves(200)
    train = DataLoader(torch.utils.data.Subset(data, range(160)), batch_size=16, shuffle=True)
    val = DataLoader(torch.utils.data.Subset(data, range(160, 200)), batch_size=20)
    checkpoint = ModelCheckpoint(dirpath="checkpoints", save_last=True)
    trainer = make_trainer(3, [checkpoint])
    trainer.fit(Regressor(), train, val)
    print(
        f"val_mae {trainer.callback_metrics['val_mae'].item():.4f}",
        sorted(p.name for p in Path("checkpoints").iterdir()),
    )

    state = torch.load("checkpoints/last.ckpt", weights_only=False)
    print("saved at step", state["global_step"], "rates", len(state["lr_schedulers"]))
    predictions = trainer.predict(Regressor.load_from_checkpoint("checkpoints/last.ckpt"), val)
    print("predictions", [f"{value:.3f}" for value in torch.cat(predictions)[:5].tolist()])


if __name__ == "__main__":
    main()
