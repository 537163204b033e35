"""Classification of images in class folders, as a PyTorch tutorial trains it on one device.

`tutorial.py` starts this script and compares its accuracy and its time with `samestep train images`. Every epoch prints
one line of JSON: accuracy, seconds, and the numbers of samples.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader
from torchvision import models, transforms
from torchvision.datasets import ImageFolder


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="folder with the folders train and val")
    parser.add_argument("--output", type=Path, required=True, help="folder of the best weights")
    parser.add_argument("--model", default="resnet34")
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--final", type=float, default=0.01, help="factor of the learning rate in the last step")
    parser.add_argument("--weight-decay", type=float, default=0.005)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, help="of arithmetic; default: torch's")
    parser.add_argument("--workers", type=int, help="loader processes; default: one per core, at most 8")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    torch.manual_seed(options.seed)
    if options.threads is not None:
        torch.set_num_threads(options.threads)

    normalize = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    train_transform = transforms.Compose(
        [
            transforms.RandomResizedCrop(options.image_size),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            normalize,
        ]
    )
    validation_transform = transforms.Compose(
        [
            transforms.Resize(round(options.image_size / 0.875)),
            transforms.CenterCrop(options.image_size),
            transforms.ToTensor(),
            normalize,
        ]
    )
    train_data = ImageFolder(options.data / "train", train_transform)
    validation_data = ImageFolder(options.data / "val", validation_transform)
    workers = options.workers
    if workers is None:
        workers = min(len(os.sched_getaffinity(0)), options.batch_size, 8)
    train_loader = DataLoader(train_data, options.batch_size, shuffle=True, num_workers=workers)
    validation_loader = DataLoader(validation_data, options.batch_size, num_workers=workers)

    model = getattr(models, options.model)(num_classes=len(train_data.classes))
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), options.lr, momentum=0.9, weight_decay=options.weight_decay)
    steps = len(train_loader) * options.epochs
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, eta_min=options.lr * options.final)

    best = -1.0
    for epoch in range(options.epochs):
        began = time.perf_counter()
        model.train()
        for images, labels in train_loader:
            optimizer.zero_grad()
            loss = loss_function(model(images), labels)
            loss.backward()
            optimizer.step()
            scheduler.step()

        model.eval()
        correct = 0
        with torch.no_grad():
            for images, labels in validation_loader:
                correct += (model(images).argmax(1) == labels).sum().item()
        accuracy = correct / len(validation_data)
        if accuracy > best:
            best = accuracy
            torch.save(model.state_dict(), options.output / "best.pth")
        seconds = time.perf_counter() - began
        counts = {"train": len(train_data), "validation": len(validation_data)}
        print(json.dumps({"epoch": epoch, "accuracy": accuracy, "seconds": seconds, **counts}), flush=True)


if __name__ == "__main__":
    main()
