"""A layer draws from a module-level generator, also in evaluation mode."""

import torch
from parts import Plain, Points, batches_of, fit, seeded, sgd
from torch import nn

import samestep

GENERATOR = torch.Generator().manual_seed(3)


class Noise(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + 0.1 * torch.randn(values.shape, generator=GENERATOR)


with samestep.start() as world:
    model = seeded(Plain, Noise())
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    fit(engine, batches_of(world, Points()))
