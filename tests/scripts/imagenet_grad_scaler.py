"""Classification with mixed precision and a gradient scaler: Trainer class, logging, checkpoints with the scaler."""

import argparse
import logging
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import FakeData

logging.basicConfig(level=logging.INFO, format="%(levelname)s | %(message)s", stream=sys.stdout)
logger = logging.getLogger("train")


def conv_block(inputs, outputs, pool=False):
    layers = [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    if pool:
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


class ResNet9(nn.Module):
    def __init__(self, width, num_classes):
        super().__init__()
        self.stem = conv_block(3, width)
        self.down1 = conv_block(width, width * 2, pool=True)
        self.res1 = nn.Sequential(conv_block(width * 2, width * 2), conv_block(width * 2, width * 2))
        self.down2 = conv_block(width * 2, width * 4, pool=True)
        self.down3 = conv_block(width * 4, width * 4, pool=True)
        self.res2 = nn.Sequential(conv_block(width * 4, width * 4), conv_block(width * 4, width * 4))
        self.classifier = nn.Sequential(
            nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Dropout(0.1), nn.Linear(width * 4, num_classes)
        )

    def forward(self, x):
        x = self.down1(self.stem(x))
        x = x + self.res1(x)
        x = self.down3(self.down2(x))
        x = x + self.res2(x)
        return self.classifier(x)


class AverageMeter:
    def __init__(self):
        self.sum = 0.0
        self.count = 0

    def update(self, value, n):
        self.sum += value * n
        self.count += n

    @property
    def avg(self):
        return self.sum / max(self.count, 1)


class Trainer:
    def __init__(self, args):
        self.args = args
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype = torch.float16 if self.device.type == "cuda" else torch.bfloat16
        self.model = ResNet9(8, args.classes).to(self.device)
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=0.05)
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=2.0**10, growth_interval=6)
        transform = transforms.Compose([transforms.ToTensor(), transforms.Normalize((0.5,) * 3, (0.25,) * 3)])
        train_set = FakeData(args.rows, (3, 32, 32), args.classes, transform)
        valid_set = FakeData(60, (3, 32, 32), args.classes, transform, random_offset=1000)
        self.train_loader = DataLoader(train_set, args.batch_size, shuffle=True)
        self.valid_loader = DataLoader(valid_set, args.batch_size)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, max_lr=args.lr, total_steps=args.epochs * len(self.train_loader)
        )
        self.epoch = 0
        self.best = 0.0

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype)

    def train_one_epoch(self):
        self.model.train()
        losses = AverageMeter()
        for i, (images, target) in enumerate(self.train_loader):
            images, target = images.to(self.device), target.to(self.device)
            with self.autocast():
                loss = self.criterion(self.model(images), target)
            self.optimizer.zero_grad(set_to_none=True)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.args.clip)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            losses.update(loss.item(), len(target))
            if i % 2 == 0:
                logger.info(
                    "epoch %d step %d loss %.3f (%.3f) norm %.2f scale %g lr %.2e",
                    self.epoch, i, loss.item(), losses.avg, norm, self.scaler.get_scale(), self.scheduler.get_last_lr()[0],
                )  # fmt: skip
        return losses.avg

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        losses, top1 = AverageMeter(), AverageMeter()
        for images, target in self.valid_loader:
            images, target = images.to(self.device), target.to(self.device)
            with self.autocast():
                output = self.model(images)
                loss = self.criterion(output, target)
            losses.update(loss.item(), len(target))
            top1.update((output.argmax(1) == target).double().mean().item(), len(target))
        return losses.avg, top1.avg

    def save(self, path):
        state = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "scaler", "scheduler")}
        torch.save({**state, "epoch": self.epoch, "best": self.best}, path)

    def load(self, path):
        state = torch.load(path, map_location=self.device)
        for name in ("model", "optimizer", "scaler", "scheduler"):
            getattr(self, name).load_state_dict(state[name])
        self.epoch, self.best = state["epoch"], state["best"]

    def fit(self):
        folder = Path(self.args.output)
        folder.mkdir(parents=True, exist_ok=True)
        if self.args.resume:
            self.load(self.args.resume)
            logger.info("resumed at epoch %d", self.epoch)
        while self.epoch < self.args.epochs:
            train_loss = self.train_one_epoch()
            valid_loss, acc = self.evaluate()
            self.epoch += 1
            logger.info("epoch %d: train %.3f valid %.3f acc %.3f", self.epoch, train_loss, valid_loss, acc)
            self.save(folder / "last.pt")
            if acc >= self.best:
                self.best = acc
                self.save(folder / "best.pt")
        logger.info("best accuracy %.3f", self.best)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--rows", type=int, default=210)
    parser.add_argument("--classes", type=int, default=7)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--output", default="runs/amp")
    parser.add_argument("--resume", default=None)
    parser.add_argument("--seed", type=int, default=3)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    Trainer(args).fit()
