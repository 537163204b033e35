"""A plain loop whose data have a damaged sample: `damaged_loop.py WORKERS RANK`; on all ranks for RANK -1."""

import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import samestep


class Files(Dataset[tuple[torch.Tensor, int]]):
    def __init__(self, rank: int) -> None:
        self._is_damaged = rank in (-1, samestep.init().rank)

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 23 and self._is_damaged:
            raise OSError("the file is damaged")
        return torch.full((6,), float(index)), index % 3


workers, rank = map(int, sys.argv[1:])
torch.manual_seed(0)
model = samestep.parallel(nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for inputs, targets in samestep.loader(Files(rank), 8, num_workers=workers):
    loss = functional.cross_entropy(model(inputs), targets)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("end", flush=True)
