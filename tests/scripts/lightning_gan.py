"""GAN with Lightning: manual optimization, two optimizers, two schedulers and a callback that samples."""

import logging
import warnings

import lightning as L
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

LATENT = 32


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(LATENT, 128),
            nn.LeakyReLU(0.2),
            nn.Linear(128, 256),
            nn.BatchNorm1d(256, 0.8),
            nn.LeakyReLU(0.2),
            nn.Linear(256, 144),
            nn.Tanh(),
        )

    def forward(self, z):
        return self.net(z).view(-1, 1, 12, 12)


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Flatten(),
            nn.Linear(144, 256),
            nn.LeakyReLU(0.2),
            nn.Dropout(0.1),
            nn.Linear(256, 64),
            nn.LeakyReLU(0.2),
            nn.Linear(64, 1),
        )

    def forward(self, images):
        return self.net(images)


class GAN(L.LightningModule):
    def __init__(self, lr=1e-3):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = Generator()
        self.discriminator = Discriminator()
        self.register_buffer("fixed", torch.randn(6, LATENT))
        self.history = []

    def forward(self, z):
        return self.generator(z)

    def adversarial_loss(self, logits, real):
        return F.binary_cross_entropy_with_logits(logits, torch.full_like(logits, float(real)))

    def training_step(self, batch, batch_idx):
        (images,) = batch
        generator_optimizer, discriminator_optimizer = self.optimizers()
        z = torch.randn(len(images), LATENT).type_as(images)

        self.toggle_optimizer(generator_optimizer)
        loss_g = self.adversarial_loss(self.discriminator(self(z)), True)
        generator_optimizer.zero_grad()
        self.manual_backward(loss_g)
        generator_optimizer.step()
        self.untoggle_optimizer(generator_optimizer)

        self.toggle_optimizer(discriminator_optimizer)
        real = self.adversarial_loss(self.discriminator(images), True)
        fake = self.adversarial_loss(self.discriminator(self(z).detach()), False)
        loss_d = (real + fake) / 2
        discriminator_optimizer.zero_grad()
        self.manual_backward(loss_d)
        self.clip_gradients(discriminator_optimizer, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        discriminator_optimizer.step()
        self.untoggle_optimizer(discriminator_optimizer)

        self.log_dict({"g_loss": loss_g, "d_loss": loss_d}, on_epoch=True)
        self.history.append((loss_g.item(), loss_d.item()))

    def on_train_epoch_end(self):
        for scheduler in self.lr_schedulers():
            scheduler.step()
        with torch.no_grad():
            samples = self(self.fixed)
        print(f"epoch {self.current_epoch}: samples {samples.mean().item():.4f} {samples.std().item():.4f}")

    def configure_optimizers(self):
        g = torch.optim.Adam(self.generator.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999))
        d = torch.optim.Adam(self.discriminator.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999))
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8) for optimizer in (g, d)]
        return [g, d], schedulers


def main():
    L.seed_everything(7)
    rows = torch.linspace(-1, 1, 12).view(1, 1, 12, 1)
    images = (rows * torch.randn(320, 1, 1, 12) + 0.1 * torch.randn(320, 1, 12, 12)).clamp(-1, 1)
    loader = DataLoader(TensorDataset(images), batch_size=64, shuffle=True)
    model = GAN()
    trainer = L.Trainer(
        max_epochs=3,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, loader)
    for step, (g, d) in enumerate(model.history):
        print(f"step {step}: generator {g:.4f} discriminator {d:.4f}")
    print("steps of both optimizers", trainer.global_step)


if __name__ == "__main__":
    main()
