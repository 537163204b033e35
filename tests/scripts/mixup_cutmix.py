"""Image classification with mixup and CutMix, chosen at random for each batch."""

import argparse
import csv
import os

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser(description="mixup and CutMix")
parser.add_argument("--lr", default=0.05, type=float)
parser.add_argument("--seed", default=20170922, type=int)
parser.add_argument("--batch-size", default=48, type=int)
parser.add_argument("--epoch", default=3, type=int)
parser.add_argument("--decay", default=1e-4, type=float)
parser.add_argument("--alpha", default=1.0, type=float)
parser.add_argument("--cutmix-prob", default=0.5, type=float)
args = parser.parse_args()

use_cuda = torch.cuda.is_available()
best_acc = 0
torch.manual_seed(args.seed)
np.random.seed(args.seed % 2**31)


def make_data(count, size=16, num_classes=6):
    patterns = np.random.RandomState(0).randn(num_classes, 3, size, size)
    targets = np.random.randint(0, num_classes, count)
    inputs = patterns[targets] + 1.5 * np.random.randn(count, 3, size, size)
    return TensorDataset(torch.Tensor(inputs), torch.tensor(targets))


print("==> Preparing data..")
trainloader = DataLoader(make_data(325), batch_size=args.batch_size, shuffle=True)
testloader = DataLoader(make_data(110), batch_size=100, shuffle=False)

print("==> Building model..")
net = nn.Sequential(
    nn.Conv2d(3, 16, 3, padding=1, bias=False),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
    nn.BatchNorm2d(32),
    nn.ReLU(),
    nn.Dropout2d(0.1),
    nn.AdaptiveAvgPool2d(2),
    nn.Flatten(),
    nn.Linear(128, 6),
)
if use_cuda:
    net.cuda()

os.makedirs("results", exist_ok=True)
logname = os.path.join("results", f"log_mixup_{args.seed}.csv")
criterion = nn.CrossEntropyLoss()
optimizer = optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, weight_decay=args.decay)


def mixup_data(x, y, alpha=1.0):
    """Mixed inputs, both targets, and the share of the first."""
    lam = np.random.beta(alpha, alpha) if alpha > 0 else 1
    index = torch.randperm(x.size()[0])
    if use_cuda:
        index = index.cuda()
    mixed_x = lam * x + (1 - lam) * x[index, :]
    return mixed_x, y, y[index], lam


def rand_bbox(size, lam):
    W, H = size[2], size[3]
    cut_rat = np.sqrt(1.0 - lam)
    cut_w, cut_h = int(W * cut_rat), int(H * cut_rat)
    cx, cy = np.random.randint(W), np.random.randint(H)
    x1, x2 = np.clip([cx - cut_w // 2, cx + cut_w // 2], 0, W)
    y1, y2 = np.clip([cy - cut_h // 2, cy + cut_h // 2], 0, H)
    return x1, y1, x2, y2


def cutmix_data(x, y, alpha=1.0):
    lam = np.random.beta(alpha, alpha)
    rand_index = torch.randperm(x.size()[0])
    x1, y1, x2, y2 = rand_bbox(x.size(), lam)
    x[:, :, x1:x2, y1:y2] = x[rand_index, :, x1:x2, y1:y2]
    lam = 1 - ((x2 - x1) * (y2 - y1) / (x.size()[-1] * x.size()[-2]))
    return x, y, y[rand_index], lam


def mix_criterion(criterion, pred, y_a, y_b, lam):
    return lam * criterion(pred, y_a) + (1 - lam) * criterion(pred, y_b)


def train(epoch):
    print(f"\nEpoch: {epoch}")
    net.train()
    train_loss, correct, total = 0, 0, 0
    for batch_idx, (inputs, targets) in enumerate(trainloader):
        if use_cuda:
            inputs, targets = inputs.cuda(), targets.cuda()
        if np.random.rand(1) < args.cutmix_prob:
            inputs, targets_a, targets_b, lam = cutmix_data(inputs, targets, args.alpha)
        else:
            inputs, targets_a, targets_b, lam = mixup_data(inputs, targets, args.alpha)
        outputs = net(inputs)
        loss = mix_criterion(criterion, outputs, targets_a, targets_b, lam)
        train_loss += loss.item()
        _, predicted = torch.max(outputs.data, 1)
        total += targets.size(0)
        correct += (
            lam * predicted.eq(targets_a.data).cpu().sum().item()
            + (1 - lam) * predicted.eq(targets_b.data).cpu().sum().item()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if batch_idx % 3 == 0:
            print(
                f"{batch_idx}/{len(trainloader)} Loss: {train_loss / (batch_idx + 1):.3f} | "
                f"Acc: {100.0 * correct / total:.3f}% ({correct:.2f}/{total}) | lam {lam:.3f}"
            )
    return train_loss / len(trainloader), 100.0 * correct / total


def test(epoch):
    global best_acc
    net.eval()
    test_loss, correct, total = 0, 0, 0
    with torch.no_grad():
        for inputs, targets in testloader:
            if use_cuda:
                inputs, targets = inputs.cuda(), targets.cuda()
            outputs = net(inputs)
            test_loss += criterion(outputs, targets).item()
            predicted = outputs.argmax(1)
            total += targets.size(0)
            correct += predicted.eq(targets).cpu().sum().item()
    acc = 100.0 * correct / total
    print(f"Test Loss: {test_loss / len(testloader):.3f} | Acc: {acc:.3f}% ({correct}/{total})")
    if acc > best_acc:
        best_acc = acc
        torch.save({"net": net, "acc": acc, "epoch": epoch, "rng_state": torch.get_rng_state()}, "mixup.ckpt")
    return test_loss / len(testloader), acc


with open(logname, "w", newline="") as logfile:
    csv.writer(logfile).writerow(["epoch", "train loss", "train acc", "test loss", "test acc"])
for epoch in range(args.epoch):
    for param_group in optimizer.param_groups:
        param_group["lr"] = args.lr * 0.1 ** (epoch // 2)
    train_loss, train_acc = train(epoch)
    test_loss, test_acc = test(epoch)
    with open(logname, "a", newline="") as logfile:
        csv.writer(logfile).writerow([epoch, train_loss, train_acc, test_loss, test_acc])
