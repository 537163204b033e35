"""The number of threads depends on the number of processes."""

import torch
from parts import Plain, Points, batches_of, fit, seeded, sgd
from torch import nn

import samestep


class WideMean(nn.Module):
    """A sum large enough for several threads."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        wide = torch.sin(values.sum() * torch.arange(1.0, 1_000_001.0))
        return values + wide.sum() / 1e6


world = samestep.init()
torch.set_num_threads(max(1, 4 // world.size))
model = samestep.parallel(seeded(Plain, WideMean()))
fit(model, sgd(model), batches_of(Points(64)))
