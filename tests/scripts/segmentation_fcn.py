"""Semantic segmentation: outputs in a dictionary, an ignored class, an auxiliary loss and the mean IoU."""

import argparse
import os
from collections import OrderedDict

import torch
import torch.utils.data
from torch import nn
from torch.nn import functional as F


class Scenes(torch.utils.data.Dataset):
    """Images [3, 48, 48] of rectangles of four classes; borders of rectangles have label 255."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        self.items = [self._scene(generator) for _ in range(count)]

    @staticmethod
    def _scene(generator, size=48):
        label = torch.zeros(size, size, dtype=torch.int64)
        for _ in range(int(torch.randint(2, 6, (1,), generator=generator))):
            kind = int(torch.randint(1, 5, (1,), generator=generator))
            y, x = torch.randint(0, size - 22, (2,), generator=generator).tolist()
            h, w = torch.randint(10, 22, (2,), generator=generator).tolist()
            label[y : y + h, x : x + w] = 255
            label[y + 1 : y + h - 1, x + 1 : x + w - 1] = kind
        colours = torch.eye(5)[label.clamp(max=4)][..., 1:4].permute(2, 0, 1)
        return colours + 0.3 * torch.randn(3, size, size, generator=generator), label

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def layer(inputs, outputs, stride=1, dilation=1):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, stride, padding=dilation, dilation=dilation, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(),
    )


class FCNHead(nn.Sequential):
    def __init__(self, in_channels, channels):
        inter_channels = in_channels // 2
        super().__init__(
            nn.Conv2d(in_channels, inter_channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(inter_channels),
            nn.ReLU(),
            nn.Dropout(0.1),
            nn.Conv2d(inter_channels, channels, 1),
        )


class FCN(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.backbone = nn.ModuleDict(
            {"layer1": layer(3, 12, 2), "layer2": layer(12, 24, 2), "layer3": layer(24, 32, 1, dilation=2)}
        )
        self.classifier = FCNHead(32, num_classes)
        self.aux_classifier = FCNHead(24, num_classes)

    def forward(self, x):
        input_shape = x.shape[-2:]
        features = OrderedDict()
        for name, module in self.backbone.items():
            x = module(x)
            features[name] = x
        result = OrderedDict()
        for name, head, feature in (("out", self.classifier, "layer3"), ("aux", self.aux_classifier, "layer2")):
            result[name] = F.interpolate(
                head(features[feature]), size=input_shape, mode="bilinear", align_corners=False
            )
        return result


class ConfusionMatrix:
    def __init__(self, num_classes):
        self.num_classes = num_classes
        self.mat = None

    def update(self, a, b):
        n = self.num_classes
        if self.mat is None:
            self.mat = torch.zeros((n, n), dtype=torch.int64, device=a.device)
        with torch.inference_mode():
            k = (a >= 0) & (a < n)
            inds = n * a[k].to(torch.int64) + b[k]
            self.mat += torch.bincount(inds, minlength=n**2).reshape(n, n)

    def compute(self):
        h = self.mat.to(torch.get_default_dtype())
        acc_global = torch.diag(h).sum() / h.sum()
        acc = torch.diag(h) / h.sum(1)
        iu = torch.diag(h) / (h.sum(1) + h.sum(0) - torch.diag(h))
        return acc_global, acc, iu

    def __str__(self):
        acc_global, acc, iu = self.compute()
        rows = [f"{i:.1f}" for i in (acc * 100).tolist()], [f"{i:.1f}" for i in (iu * 100).tolist()]
        return (
            f"global correct: {acc_global.item() * 100:.1f}\n"
            f"average row correct: {rows[0]}\nIoU: {rows[1]}\nmean IoU: {iu.mean().item() * 100:.1f}"
        )


def criterion(inputs, target):
    losses = {name: nn.functional.cross_entropy(x, target, ignore_index=255) for name, x in inputs.items()}
    return losses["out"] + 0.5 * losses["aux"]


def evaluate(model, data_loader, device, num_classes):
    model.eval()
    confmat = ConfusionMatrix(num_classes)
    num_processed_samples = 0
    with torch.inference_mode():
        for image, target in data_loader:
            image, target = image.to(device), target.to(device)
            output = model(image)["out"]
            confmat.update(target.flatten(), output.argmax(1).flatten())
            num_processed_samples += image.shape[0]
    print(f"Test: {num_processed_samples} images")
    return confmat


def train_one_epoch(model, optimizer, data_loader, lr_scheduler, device, epoch, print_freq):
    model.train()
    for i, (image, target) in enumerate(data_loader):
        image, target = image.to(device), target.to(device)
        output = model(image)
        loss = criterion(output, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        if i % print_freq == 0:
            lr = optimizer.param_groups[0]["lr"]
            print(f"Epoch: [{epoch}]  [{i}/{len(data_loader)}]  lr: {lr:.5f}  loss: {loss.item():.4f}")


def main(args):
    os.makedirs(args.output_dir, exist_ok=True)
    torch.manual_seed(args.seed)
    device = torch.device(args.device)
    num_classes = 5
    dataset = Scenes(92, seed=1)
    dataset_test = Scenes(35, seed=2)
    data_loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=args.batch_size,
        sampler=torch.utils.data.RandomSampler(dataset),
        drop_last=True,
    )
    data_loader_test = torch.utils.data.DataLoader(
        dataset_test, batch_size=8, sampler=torch.utils.data.SequentialSampler(dataset_test)
    )
    model = FCN(num_classes).to(device)
    params_to_optimize = [
        {"params": [p for p in model.backbone.parameters() if p.requires_grad]},
        {"params": [p for p in model.classifier.parameters() if p.requires_grad]},
        {"params": [p for p in model.aux_classifier.parameters() if p.requires_grad], "lr": args.lr * 2},
    ]
    optimizer = torch.optim.SGD(params_to_optimize, lr=args.lr, momentum=0.9, weight_decay=1e-4)
    iters = len(data_loader) * args.epochs
    lr_scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=iters, power=0.9)

    for epoch in range(args.epochs):
        train_one_epoch(model, optimizer, data_loader, lr_scheduler, device, epoch, args.print_freq)
        confmat = evaluate(model, data_loader_test, device, num_classes)
        print(confmat)
        checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        torch.save(checkpoint, os.path.join(args.output_dir, f"model_{epoch}.pth"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    parser.add_argument("-b", "--batch-size", default=10, type=int)
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("--lr", default=0.1, type=float)
    parser.add_argument("--print-freq", default=3, type=int)
    parser.add_argument("--output-dir", default="segmentation_output")
    parser.add_argument("--seed", default=0, type=int)
    main(parser.parse_args())
