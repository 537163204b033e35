"""Binary segmentation with a U-Net: dice and cross-entropy losses, a schedule by plateaus, early stopping."""

import argparse
import logging
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import optim
from torch.utils.data import DataLoader, Dataset, random_split
from tqdm import tqdm

dir_checkpoint = Path("./unet_checkpoints/")


class ShapesDataset(Dataset):
    """Noisy images with an ellipse, and masks of the ellipse."""

    def __init__(self, count, size=32):
        rng = np.random.default_rng(0)
        rows, columns = np.mgrid[0:size, 0:size]
        self.ids = [f"{number:04d}" for number in range(count)]
        self.images, self.masks = [], []
        for _ in range(count):
            y, x = rng.uniform(8, size - 8, 2)
            a, b = rng.uniform(3, 8, 2)
            mask = ((rows - y) / a) ** 2 + ((columns - x) / b) ** 2 < 1
            self.images.append(mask * rng.uniform(0.4, 1) + rng.normal(0, 0.3, (size, size)))
            self.masks.append(mask)

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, idx):
        return {"image": torch.Tensor(self.images[idx])[None], "mask": torch.Tensor(self.masks[idx])}


class DoubleConv(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.double_conv = nn.Sequential(
            nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False),
            nn.BatchNorm2d(out_channels),
            nn.ReLU(inplace=True),
        )

    def forward(self, x):
        return self.double_conv(x)


class Up(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.up = nn.ConvTranspose2d(in_channels, in_channels // 2, kernel_size=2, stride=2)
        self.conv = DoubleConv(in_channels, out_channels)

    def forward(self, x1, x2):
        return self.conv(torch.cat([x2, self.up(x1)], dim=1))


class UNet(nn.Module):
    def __init__(self, n_channels=1, n_classes=1, width=8):
        super().__init__()
        self.n_channels = n_channels
        self.n_classes = n_classes
        self.inc = DoubleConv(n_channels, width)
        self.down1 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(width, width * 2))
        self.down2 = nn.Sequential(nn.MaxPool2d(2), DoubleConv(width * 2, width * 4))
        self.up1 = Up(width * 4, width * 2)
        self.up2 = Up(width * 2, width)
        self.outc = nn.Conv2d(width, n_classes, kernel_size=1)

    def forward(self, x):
        x1 = self.inc(x)
        x2 = self.down1(x1)
        x3 = self.down2(x2)
        return self.outc(self.up2(self.up1(x3, x2), x1))


def dice_coeff(input, target, epsilon=1e-6):
    """Average over the images of 2 |A and B| / (|A| + |B|)."""
    inter = 2 * (input * target).sum(dim=(-1, -2))
    sets_sum = input.sum(dim=(-1, -2)) + target.sum(dim=(-1, -2))
    sets_sum = torch.where(sets_sum == 0, inter, sets_sum)
    return ((inter + epsilon) / (sets_sum + epsilon)).mean()


def dice_loss(input, target):
    """One minus the dice of the batch as one image."""
    inter = 2 * (input * target).sum()
    return 1 - (inter + 1e-6) / (input.sum() + target.sum() + 1e-6)


@torch.inference_mode()
def evaluate(net, dataloader, device):
    net.eval()
    dice_score = 0
    for batch in dataloader:
        image, mask_true = batch["image"].to(device), batch["mask"].to(device)
        mask_pred = net(image)
        mask_pred = (F.sigmoid(mask_pred.squeeze(1)) > 0.5).type_as(mask_true)
        dice_score += dice_coeff(mask_pred, mask_true)
    net.train()
    return dice_score / max(len(dataloader), 1)


def train_model(model, device, epochs=3, batch_size=16, learning_rate=0.03, val_percent=0.2, gradient_clipping=1.0):
    dataset = ShapesDataset(130)
    n_val = int(len(dataset) * val_percent)
    n_train = len(dataset) - n_val
    train_set, val_set = random_split(dataset, [n_train, n_val], generator=torch.Generator().manual_seed(0))
    train_loader = DataLoader(train_set, shuffle=True, batch_size=batch_size)
    val_loader = DataLoader(val_set, shuffle=False, drop_last=True, batch_size=batch_size)
    logging.info(f"Starting training: {epochs} epochs, {n_train} images, {n_val} for validation, on {device.type}")

    optimizer = optim.SGD(model.parameters(), lr=learning_rate, weight_decay=1e-8, momentum=0.9, foreach=True)
    scheduler = optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max", patience=1, factor=0.3)
    criterion = nn.BCEWithLogitsLoss()
    global_step = 0
    best = 0
    waited = 0
    for epoch in range(1, epochs + 1):
        model.train()
        epoch_loss = 0
        with tqdm(total=n_train, desc=f"Epoch {epoch}/{epochs}", unit="img") as pbar:
            for batch in train_loader:
                images, true_masks = batch["image"], batch["mask"]
                assert images.shape[1] == model.n_channels
                images = images.to(device, memory_format=torch.channels_last)
                true_masks = true_masks.to(device)
                masks_pred = model(images).squeeze(1)
                loss = criterion(masks_pred, true_masks)
                loss += dice_loss(F.sigmoid(masks_pred), true_masks)

                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), gradient_clipping)
                optimizer.step()

                pbar.update(images.shape[0])
                global_step += 1
                epoch_loss += loss.item()
                pbar.set_postfix(**{"loss (batch)": loss.item()})

                division_step = n_train // (3 * batch_size)
                if division_step > 0 and global_step % division_step == 0:
                    val_score = evaluate(model, val_loader, device)
                    scheduler.step(val_score)
                    logging.info(
                        f"Step {global_step}: loss {loss.item():.4f}, dice of validation {val_score:.4f}, "
                        f"lr {optimizer.param_groups[0]['lr']:.2e}"
                    )
        val_score = evaluate(model, val_loader, device).item()
        logging.info(f"Epoch {epoch}: loss {epoch_loss / len(train_loader):.4f}, dice {val_score:.4f}")
        if val_score > best:
            best, waited = val_score, 0
            dir_checkpoint.mkdir(parents=True, exist_ok=True)
            torch.save(model.state_dict(), str(dir_checkpoint / "best.pth"))
            logging.info(f"Checkpoint {epoch} saved!")
        else:
            waited += 1
            if waited == 2:
                logging.info("Early stopping")
                break

    model.load_state_dict(torch.load(str(dir_checkpoint / "best.pth"), map_location=device))
    logging.info(f"Best dice: {evaluate(model, val_loader, device):.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", "-e", type=int, default=3)
    parser.add_argument("--batch-size", "-b", type=int, default=16)
    parser.add_argument("--learning-rate", "-l", type=float, default=0.03, dest="lr")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s", stream=sys.stdout)
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = UNet().to(device=device, memory_format=torch.channels_last)
    train_model(model, device, epochs=args.epochs, batch_size=args.batch_size, learning_rate=args.lr)
