"""A residual network on 32 x 32 images: warm-up, cosine schedule, random crops and flips."""

import argparse
import os
import random

import numpy as np
import torch
import torch.backends.cudnn as cudnn
import torch.nn as nn
import torch.nn.functional as F
import torchvision.transforms as T
from PIL import Image
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR
from torch.utils.data import DataLoader, Dataset


class SyntheticCIFAR(Dataset):
    """Coloured stripes; the class is the direction and the colour."""

    classes = ("plane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

    def __init__(self, size, seed, transform):
        rng = np.random.RandomState(seed)
        self.targets = rng.randint(0, 10, size)
        rows, columns = np.mgrid[0:32, 0:32]
        images = []
        for target in self.targets:
            angle = np.pi * target / 10
            wave = np.sin((np.cos(angle) * rows + np.sin(angle) * columns) * 0.8 + rng.uniform(0, 6))
            image = (
                120 + 60 * wave[..., None] * np.array([1, target / 9, 1 - target / 9]) + rng.normal(0, 25, (32, 32, 3))
            )
            images.append(image.clip(0, 255).astype(np.uint8))
        self.data = np.stack(images)
        self.transform = transform

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.transform(Image.fromarray(self.data[index])), int(self.targets[index])


class BasicBlock(nn.Module):
    def __init__(self, in_planes, planes, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(in_planes, planes, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, kernel_size=3, stride=1, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_planes != planes:
            self.shortcut = nn.Sequential(
                nn.Conv2d(in_planes, planes, kernel_size=1, stride=stride, bias=False), nn.BatchNorm2d(planes)
            )

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.shortcut(x)
        return F.relu(out)


class ResNet(nn.Module):
    def __init__(self, num_blocks, width=8, num_classes=10):
        super().__init__()
        self.in_planes = width
        self.conv1 = nn.Conv2d(3, width, kernel_size=3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.layer1 = self._make_layer(width, num_blocks[0], stride=1)
        self.layer2 = self._make_layer(width * 2, num_blocks[1], stride=2)
        self.layer3 = self._make_layer(width * 4, num_blocks[2], stride=2)
        self.linear = nn.Linear(width * 4, num_classes)

    def _make_layer(self, planes, blocks, stride):
        layers = []
        for s in [stride] + [1] * (blocks - 1):
            layers.append(BasicBlock(self.in_planes, planes, s))
            self.in_planes = planes
        return nn.Sequential(*layers)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.layer3(self.layer2(self.layer1(out)))
        out = F.adaptive_avg_pool2d(out, 1).flatten(1)
        return self.linear(out)


parser = argparse.ArgumentParser()
parser.add_argument("--lr", default=0.02, type=float)
parser.add_argument("--epochs", default=2, type=int)
parser.add_argument("--warmup", default=4, type=int, help="steps")
parser.add_argument("--batch-size", default=32, type=int)
parser.add_argument("--workers", default=2, type=int)
parser.add_argument("--seed", default=42, type=int)


def set_seed(seed):
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)
    cudnn.deterministic = True


def run_epoch(net, loader, criterion, device, optimizer=None, scheduler=None):
    training = optimizer is not None
    net.train(training)
    loss_sum, correct, total = 0.0, 0, 0
    with torch.set_grad_enabled(training):
        for step, (inputs, targets) in enumerate(loader):
            inputs, targets = inputs.to(device), targets.to(device)
            outputs = net(inputs)
            loss = criterion(outputs, targets)
            if training:
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                scheduler.step()
            loss_sum += loss.item() * targets.size(0)
            _, predicted = outputs.max(1)
            total += targets.size(0)
            correct += predicted.eq(targets).sum().item()
            if training and step % 3 == 0:
                print(f"  [{step}/{len(loader)}] loss {loss.item():.3f} lr {scheduler.get_last_lr()[0]:.4f}")
    return loss_sum / total, 100.0 * correct / total


def main():
    args = parser.parse_args()
    set_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"

    normalize = T.Normalize((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
    transform_train = T.Compose([T.RandomCrop(32, padding=4), T.RandomHorizontalFlip(), T.ToTensor(), normalize])
    transform_test = T.Compose([T.ToTensor(), normalize])
    trainset = SyntheticCIFAR(236, seed=0, transform=transform_train)
    testset = SyntheticCIFAR(90, seed=1, transform=transform_test)
    trainloader = DataLoader(trainset, batch_size=args.batch_size, shuffle=True, num_workers=args.workers)
    testloader = DataLoader(testset, batch_size=50, shuffle=False, num_workers=args.workers)

    net = ResNet([1, 1, 1]).to(device)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
    total_steps = args.epochs * len(trainloader)
    scheduler = SequentialLR(
        optimizer,
        [
            LinearLR(optimizer, start_factor=0.1, total_iters=args.warmup),
            CosineAnnealingLR(optimizer, T_max=total_steps - args.warmup),
        ],
        milestones=[args.warmup],
    )

    best_acc = 0
    for epoch in range(args.epochs):
        train_loss, train_acc = run_epoch(net, trainloader, criterion, device, optimizer, scheduler)
        test_loss, test_acc = run_epoch(net, testloader, criterion, device)
        print(f"Epoch {epoch}: train {train_loss:.4f} / {train_acc:.2f}%, test {test_loss:.4f} / {test_acc:.2f}%")
        if test_acc > best_acc:
            print("Saving..")
            os.makedirs("checkpoint", exist_ok=True)
            torch.save({"net": net.state_dict(), "acc": test_acc, "epoch": epoch}, "./checkpoint/ckpt.pth")
            best_acc = test_acc
    print(f"Best accuracy: {best_acc:.2f}%")


if __name__ == "__main__":
    main()
