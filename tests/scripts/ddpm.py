"""Denoising diffusion of digits: a small U-Net with time embeddings, EMA of the weights, sampling at the end."""

import copy
import math
import os
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm


@dataclass
class TrainingConfig:
    image_size = 8
    train_batch_size = 48
    num_epochs = 2
    learning_rate = 2e-3
    timesteps = 50
    ema_decay = 0.95
    sample_num = 10
    output_dir = "ddpm_results"
    seed = 0


def cosine_beta_schedule(timesteps, s=0.008):
    steps = torch.arange(timesteps + 1) / timesteps
    alphas_cumprod = torch.cos((steps + s) / (1 + s) * math.pi * 0.5) ** 2
    alphas_cumprod = alphas_cumprod / alphas_cumprod[0]
    betas = 1 - (alphas_cumprod[1:] / alphas_cumprod[:-1])
    return torch.clip(betas, 0, 0.999)


class SinusoidalPositionEmbeddings(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.dim = dim

    def forward(self, time):
        half_dim = self.dim // 2
        embeddings = torch.exp(torch.arange(half_dim, device=time.device) * -(math.log(10000) / (half_dim - 1)))
        embeddings = time[:, None] * embeddings[None, :]
        return torch.cat((embeddings.sin(), embeddings.cos()), dim=-1)


class ResBlock(nn.Module):
    def __init__(self, in_ch, out_ch, time_dim):
        super().__init__()
        self.norm1 = nn.GroupNorm(4, in_ch)
        self.conv1 = nn.Conv2d(in_ch, out_ch, 3, padding=1)
        self.time = nn.Linear(time_dim, out_ch)
        self.norm2 = nn.GroupNorm(4, out_ch)
        self.conv2 = nn.Conv2d(out_ch, out_ch, 3, padding=1)
        self.skip = nn.Conv2d(in_ch, out_ch, 1) if in_ch != out_ch else nn.Identity()

    def forward(self, x, t):
        h = self.conv1(F.silu(self.norm1(x)))
        h = h + self.time(F.silu(t))[:, :, None, None]
        return self.conv2(F.silu(self.norm2(h))) + self.skip(x)


class Unet(nn.Module):
    def __init__(self, channels=1, dim=16):
        super().__init__()
        time_dim = dim * 4
        self.time_mlp = nn.Sequential(
            SinusoidalPositionEmbeddings(dim), nn.Linear(dim, time_dim), nn.GELU(), nn.Linear(time_dim, time_dim)
        )
        self.init_conv = nn.Conv2d(channels, dim, 3, padding=1)
        self.down1 = ResBlock(dim, dim, time_dim)
        self.downsample = nn.Conv2d(dim, dim * 2, 4, 2, 1)
        self.mid = ResBlock(dim * 2, dim * 2, time_dim)
        self.upsample = nn.Sequential(
            nn.Upsample(scale_factor=2, mode="nearest"), nn.Conv2d(dim * 2, dim, 3, padding=1)
        )
        self.up1 = ResBlock(dim * 2, dim, time_dim)
        self.final_conv = nn.Conv2d(dim, channels, 1)

    def forward(self, x, time):
        t = self.time_mlp(time)
        x = self.init_conv(x)
        skip = self.down1(x, t)
        x = self.mid(self.downsample(skip), t)
        x = self.up1(torch.cat((self.upsample(x), skip), dim=1), t)
        return self.final_conv(x)


class Diffusion:
    def __init__(self, timesteps, device):
        self.timesteps = timesteps
        self.device = device
        self.betas = cosine_beta_schedule(timesteps).to(device)
        alphas = 1.0 - self.betas
        self.alphas_cumprod = torch.cumprod(alphas, dim=0)
        alphas_cumprod_prev = F.pad(self.alphas_cumprod[:-1], (1, 0), value=1.0)
        self.sqrt_recip_alphas = torch.sqrt(1.0 / alphas)
        self.sqrt_alphas_cumprod = torch.sqrt(self.alphas_cumprod)
        self.sqrt_one_minus_alphas_cumprod = torch.sqrt(1.0 - self.alphas_cumprod)
        self.posterior_variance = self.betas * (1.0 - alphas_cumprod_prev) / (1.0 - self.alphas_cumprod)

    @staticmethod
    def extract(a, t, x_shape):
        return a.gather(-1, t).reshape(t.shape[0], *((1,) * (len(x_shape) - 1)))

    def q_sample(self, x_start, t, noise):
        return (
            self.extract(self.sqrt_alphas_cumprod, t, x_start.shape) * x_start
            + self.extract(self.sqrt_one_minus_alphas_cumprod, t, x_start.shape) * noise
        )

    def p_losses(self, model, x_start, t):
        noise = torch.randn_like(x_start)
        predicted_noise = model(self.q_sample(x_start, t, noise), t)
        return F.smooth_l1_loss(noise, predicted_noise)

    @torch.no_grad()
    def sample(self, model, shape):
        img = torch.randn(shape, device=self.device)
        for i in tqdm(reversed(range(self.timesteps)), desc="sampling", total=self.timesteps):
            t = torch.full((shape[0],), i, device=self.device, dtype=torch.long)
            mean = self.extract(self.sqrt_recip_alphas, t, shape) * (
                img
                - self.extract(self.betas, t, shape)
                * model(img, t)
                / self.extract(self.sqrt_one_minus_alphas_cumprod, t, shape)
            )
            img = mean
            if i > 0:
                img = mean + torch.sqrt(self.extract(self.posterior_variance, t, shape)) * torch.randn_like(img)
        return img.clamp(-1, 1)


class EMA:
    def __init__(self, model, decay):
        self.ema_model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay = decay

    @torch.no_grad()
    def update(self, model):
        for ema_param, param in zip(self.ema_model.parameters(), model.parameters()):
            ema_param.copy_(ema_param * self.decay + param * (1 - self.decay))


def main():
    config = TrainingConfig()
    torch.manual_seed(config.seed)
    np.random.seed(config.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    os.makedirs(config.output_dir, exist_ok=True)

    images = torch.tensor((load_digits().images[:500] / 8 - 1).tolist()).unsqueeze(1)
    loader = DataLoader(TensorDataset(images), batch_size=config.train_batch_size, shuffle=True)
    model = Unet().to(device)
    ema = EMA(model, config.ema_decay)
    diffusion = Diffusion(config.timesteps, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate)
    step = 0
    for epoch in range(config.num_epochs):
        progress_bar = tqdm(loader, desc=f"Epoch {epoch}")
        losses = []
        for (batch,) in progress_bar:
            batch = batch.to(device)
            t = torch.randint(0, config.timesteps, (batch.shape[0],), device=device).long()
            loss = diffusion.p_losses(model, batch, t)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            ema.update(model)
            losses.append(loss.item())
            progress_bar.set_postfix(loss=losses[-1], step=step)
            if step % 5 == 0:
                print(f"step {step}: loss {losses[-1]:.4f}")
            step += 1
        print(f"epoch {epoch}: average loss {np.mean(losses):.4f}")
        torch.save(
            {"model": model.state_dict(), "ema": ema.ema_model.state_dict(), "step": step},
            os.path.join(config.output_dir, f"model-{epoch}.pt"),
        )

    data = torch.load(os.path.join(config.output_dir, f"model-{config.num_epochs - 1}.pt"), map_location=device)
    ema.ema_model.load_state_dict(data["ema"])
    samples = diffusion.sample(ema.ema_model, (config.sample_num, 1, config.image_size, config.image_size))
    np.save(os.path.join(config.output_dir, "samples.npy"), samples.cpu().numpy())
    print(f"samples: mean {samples.mean().item():.3f}, std {samples.std().item():.3f}, data {images.mean().item():.3f}")


if __name__ == "__main__":
    main()
