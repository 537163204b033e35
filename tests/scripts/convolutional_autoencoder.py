"""A denoising convolutional autoencoder, with progress bars and pictures."""

import os

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchvision.utils import make_grid, save_image
from tqdm import tqdm

SEED = 2023
EPOCHS = 3
BATCH_SIZE = 24
NOISE = 0.2
OUT = "autoencoder_images"

np.random.seed(SEED)
torch.manual_seed(SEED)
device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")


def make_shapes(count, size=24):
    """Images of bright rectangles on a dark ground."""
    images = torch.zeros(count, 1, size, size)
    for image in images:
        top, left = np.random.randint(2, size - 10, 2)
        height, width = np.random.randint(4, 9, 2)
        image[0, top : top + height, left : left + width] = np.random.uniform(0.5, 1.0)
    return images


class Encoder(nn.Module):
    def __init__(self, latent):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(1, 8, 3, stride=2, padding=1),
            nn.ReLU(True),
            nn.Conv2d(8, 16, 3, stride=2, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(True),
            nn.Conv2d(16, 32, 3, stride=2, padding=0),
            nn.ReLU(True),
        )
        self.flatten = nn.Flatten(start_dim=1)
        self.lin = nn.Sequential(nn.Linear(2 * 2 * 32, 64), nn.ReLU(True), nn.Linear(64, latent))

    def forward(self, x):
        return self.lin(self.flatten(self.conv(x)))


class Decoder(nn.Module):
    def __init__(self, latent):
        super().__init__()
        self.lin = nn.Sequential(nn.Linear(latent, 64), nn.ReLU(True), nn.Linear(64, 3 * 3 * 32), nn.ReLU(True))
        self.unflatten = nn.Unflatten(dim=1, unflattened_size=(32, 3, 3))
        self.conv = nn.Sequential(
            nn.ConvTranspose2d(32, 16, 3, stride=2, padding=1, output_padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(True),
            nn.ConvTranspose2d(16, 8, 3, stride=2, padding=1, output_padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(True),
            nn.ConvTranspose2d(8, 1, 3, stride=2, padding=1, output_padding=1),
        )

    def forward(self, x):
        return torch.sigmoid(self.conv(self.unflatten(self.lin(x))))


dataset = TensorDataset(make_shapes(280))
train_data, val_data = random_split(dataset, [220, 60])
train_loader = DataLoader(train_data, batch_size=BATCH_SIZE, shuffle=True)
val_loader = DataLoader(val_data, batch_size=BATCH_SIZE)

encoder = Encoder(latent=8).to(device)
decoder = Decoder(latent=8).to(device)
optim = torch.optim.Adam(
    [{"params": encoder.parameters()}, {"params": decoder.parameters()}], lr=2e-3, weight_decay=1e-5
)
loss_fn = nn.MSELoss()
os.makedirs(OUT, exist_ok=True)
history = {"train_loss": [], "val_loss": []}

for epoch in range(EPOCHS):
    encoder.train()
    decoder.train()
    train_loss = []
    bar = tqdm(train_loader, desc=f"epoch {epoch + 1}", leave=False)
    for (image_batch,) in bar:
        image_batch = image_batch.to(device)
        image_noisy = (image_batch + NOISE * torch.randn_like(image_batch)).clip(0, 1)
        decoded = decoder(encoder(image_noisy))
        loss = loss_fn(decoded, image_batch)
        optim.zero_grad()
        loss.backward()
        optim.step()
        train_loss.append(loss.detach().cpu().numpy())
        bar.set_postfix(loss=loss.item())
        if len(train_loss) % 5 == 1:
            tqdm.write(f"\t partial train loss (single batch): {loss.data:.6f}")

    encoder.eval()
    decoder.eval()
    outputs, labels = [], []
    with torch.no_grad():
        for (image_batch,) in val_loader:
            noisy = (image_batch + NOISE * torch.randn_like(image_batch)).clip(0, 1).to(device)
            outputs.append(decoder(encoder(noisy)).cpu())
            labels.append(image_batch)
        outputs = torch.cat(outputs)
        labels = torch.cat(labels)
        val_loss = loss_fn(outputs, labels)
    save_image(make_grid(torch.cat([labels[:8], outputs[:8]]), nrow=8), os.path.join(OUT, f"epoch_{epoch + 1}.png"))
    history["train_loss"].append(np.mean(train_loss))
    history["val_loss"].append(val_loss.item())
    print(f"EPOCH {epoch + 1}/{EPOCHS} \t train loss {np.mean(train_loss):.5f} \t val loss {val_loss.item():.5f}")

np.savez("autoencoder_history.npz", **history)
