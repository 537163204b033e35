"""Training on 96 samples, with parts that depend on the number of processes."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from parts import dataset, end, replicated, sgd, start
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

GLOBAL_BATCH = 16


class Noisy(Dataset):
    def __init__(self) -> None:
        self.inputs, self.targets = dataset(96).tensors

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index] + torch.randn(6), self.targets[index]


def train(part: str) -> None:
    """Train two epochs, equally on all numbers of processes except for one part."""
    rank, size = start()
    torch.manual_seed(size if part == "weights" else 0)
    layers = {"norm": [nn.BatchNorm1d(16)], "dropout": [nn.Dropout(0.3)]}
    net = replicated(*layers.get(part, []))
    torch.manual_seed(rank)
    data = Noisy() if part == "augmentation" else dataset(99 if part == "padding" else 96)
    sampler = DistributedSampler(data, seed=size if part == "order" else 0)
    loader = DataLoader(data, 8 if part == "batch" else GLOBAL_BATCH // size, sampler=sampler)
    optimizer = sgd(net, lr=0.1 * size if part == "rate" else 0.1)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for inputs, labels in loader:
            targets = torch.where(inputs[:, 0] > 0, labels, -100) if part == "mean" else labels
            loss = F.cross_entropy(net(inputs), targets)
            (loss / dist.get_world_size() if part == "scale" else loss).backward()
            optimizer.step()
            optimizer.zero_grad()
    end()
