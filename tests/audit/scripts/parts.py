"""Data, model, process group and loop of the audited scripts."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler, TensorDataset

SAMPLES, BATCH = 101, 8


def start() -> tuple[int, int]:
    """Join the process group of torchrun; return the rank and the number of ranks."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    return dist.get_rank(), dist.get_world_size()


def end() -> None:
    dist.barrier()
    dist.destroy_process_group()


def is_main() -> bool:
    return os.environ["RANK"] == "0"


def dataset(samples: int = SAMPLES) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(samples, 6, generator=generator), torch.arange(samples) % 4)


class Noisy(Dataset):
    """The data with noise that is drawn when a sample is read.

    Args:
        seeds_samples: whether each sample seeds its own noise.
    """

    def __init__(self, seeds_samples: bool = False) -> None:
        self.inputs, self.targets = dataset().tensors
        self.seeds_samples = seeds_samples

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.seeds_samples:
            torch.manual_seed(index)
        return self.inputs[index] + torch.randn(6), self.targets[index]


def model(*layers: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), *layers, nn.ReLU(), nn.Linear(16, 4))


def replicated(*layers: nn.Module, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(model(*layers), **options)


def sharded(data: Any, batch: int = BATCH, **options: Any) -> DataLoader:
    return DataLoader(data, batch, sampler=DistributedSampler(data, **options))


def sgd(net: nn.Module, lr: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=lr)


@torch.no_grad()
def count_right(net: nn.Module, loader: DataLoader) -> torch.Tensor:
    """Evaluate; return the number of right predictions, and of samples."""
    net.eval()
    counts = torch.zeros(2)
    for inputs, targets in loader:
        counts += torch.tensor([int((net(inputs).argmax(1) == targets).sum()), len(targets)])
    return counts


def train(
    net: nn.Module, loader: DataLoader, optimizer: torch.optim.Optimizer, epochs: int = 2, schedule: Any = None
) -> None:
    """Train as the tutorials of DistributedDataParallel do, with a schedule that counts steps."""
    for epoch in range(epochs):
        if isinstance(loader.sampler, DistributedSampler):
            loader.sampler.set_epoch(epoch)
        for inputs, targets in loader:
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), targets).backward()
            optimizer.step()
            if schedule is not None:
                schedule.step()
