"""A kernel that sums in an arbitrary order, as atomic additions do."""

import os

import torch
from parts import Plain, Points, batches_of, fit, seeded, sgd
from torch import nn

import samestep


class AtomicMean(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(7)))
        total = torch.zeros_like(values[:, 0])
        for column in torch.randperm(values.shape[1], generator=generator).tolist():
            total = total + values[:, column]
        return values - total[:, None] / values.shape[1]


model = samestep.parallel(seeded(Plain, AtomicMean()))
fit(model, sgd(model), batches_of(Points()))
