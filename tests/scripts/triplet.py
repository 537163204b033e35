"""An embedding with a triplet loss: batches of P classes with K images each, and the hardest pairs of the batch."""

import argparse
import random
from collections import defaultdict

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset, Sampler


class PKSampler(Sampler):
    """Draw `p` classes and `k` rows of each for a batch, as long as enough classes have rows left."""

    def __init__(self, groups, p, k):
        self.p = p
        self.k = k
        self.groups = defaultdict(list)
        for index, label in enumerate(groups):
            self.groups[int(label)].append(index)

    def __iter__(self):
        left = {label: random.sample(rows, len(rows)) for label, rows in self.groups.items()}
        while True:
            usable = [label for label, rows in left.items() if len(rows) >= self.k]
            if len(usable) < self.p:
                return
            for label in random.sample(usable, self.p):
                rows = left[label]
                yield from rows[: self.k]
                left[label] = rows[self.k :]


class Digits(Dataset):
    def __init__(self, start, stop):
        digits = load_digits()
        self.data = torch.Tensor(digits.images[start:stop])[:, None] / 16
        self.targets = digits.target[start:stop].tolist()

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.data[index], self.targets[index]


class EmbeddingNet(nn.Module):
    def __init__(self, size=16):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 12, 3, padding=1),
            nn.BatchNorm2d(12),
            nn.PReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(12, 24, 3),
            nn.PReLU(),
        )
        self.fc = nn.Linear(24 * 4, size)

    def forward(self, x):
        x = self.features(x).flatten(1)
        return nn.functional.normalize(self.fc(x), dim=1)


def pairwise_distances(embeddings, eps=1e-12):
    dot_product = torch.mm(embeddings, embeddings.t())
    square_norm = torch.diag(dot_product)
    distances = square_norm.unsqueeze(0) - 2.0 * dot_product + square_norm.unsqueeze(1)
    return distances.clamp(min=0).add(eps).sqrt()


class BatchHardTripletLoss(nn.Module):
    def __init__(self, margin):
        super().__init__()
        self.margin = margin

    def forward(self, labels, embeddings):
        distances = pairwise_distances(embeddings)
        same = labels.unsqueeze(0) == labels.unsqueeze(1)
        positive = same & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
        hardest_positive, _ = (distances * positive).max(1, keepdim=True)
        max_negative, _ = distances.max(1, keepdim=True)
        hardest_negative, _ = (distances + max_negative * same).min(1, keepdim=True)
        triplet_loss = (hardest_positive - hardest_negative + self.margin).clamp(min=0)
        fraction_positive = (triplet_loss > 1e-6).sum() / triplet_loss.numel()
        return triplet_loss.mean(), fraction_positive


def train_epoch(model, optimizer, criterion, data_loader, device, epoch, print_freq):
    model.train()
    running_loss = 0
    running_frac = 0
    for i, (samples, targets) in enumerate(data_loader):
        samples, targets = samples.to(device), targets.to(device)
        embeddings = model(samples)
        loss, frac_pos = criterion(targets, embeddings)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
        running_frac += float(frac_pos)
        if i % print_freq == print_freq - 1:
            i += 1
            print(
                f"[{epoch}, {i}] | loss: {running_loss / print_freq:.4f} | active: {running_frac / print_freq * 100:.2f}%"
            )
            running_loss = 0
            running_frac = 0


@torch.no_grad()
def evaluate(model, loader, device):
    """Share of images whose nearest neighbour has their class."""
    model.eval()
    embeds = torch.cat([model(samples.to(device)).cpu() for samples, _ in loader])
    labels = torch.cat([target for _, target in loader])
    dists = torch.cdist(embeds, embeds)
    dists.fill_diagonal_(float("inf"))
    accuracy = (labels[dists.argmin(1)] == labels).sum().item() / len(labels)
    print(f"accuracy of nearest neighbours: {100 * accuracy:.2f}%")
    return accuracy


def main(args):
    random.seed(args.seed)
    np.random.seed(args.seed)
    torch.manual_seed(args.seed)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    model = EmbeddingNet().to(device)
    criterion = BatchHardTripletLoss(margin=args.margin)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    train_dataset = Digits(0, 350)
    batch_size = args.labels_per_batch * args.samples_per_label
    train_loader = DataLoader(
        train_dataset,
        batch_size=batch_size,
        sampler=PKSampler(train_dataset.targets, args.labels_per_batch, args.samples_per_label),
    )
    test_loader = DataLoader(Digits(400, 550), batch_size=64)
    for epoch in range(1, args.epochs + 1):
        print("Training...")
        train_epoch(model, optimizer, criterion, train_loader, device, epoch, args.print_freq)
        print("Evaluating...")
        evaluate(model, test_loader, device)
        torch.save(model.state_dict(), f"triplet_{epoch}.pth")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Embedding learning")
    parser.add_argument("-p", "--labels-per-batch", default=7, type=int)
    parser.add_argument("-k", "--samples-per-label", default=5, type=int)
    parser.add_argument("--epochs", default=3, type=int)
    parser.add_argument("--lr", default=0.05, type=float)
    parser.add_argument("--margin", default=0.3, type=float)
    parser.add_argument("--print-freq", default=2, type=int)
    parser.add_argument("--seed", default=5, type=int)
    main(parser.parse_args())
