"""A layer draws noise from a generator with a non-deterministic seed."""

import torch
from parts import Plain, Points, batches_of, fit, seeded, sgd
from torch import nn

import samestep


class Noise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()
        self.generator.seed()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + 0.1 * torch.randn(values.shape, generator=self.generator) if self.training else values


model = samestep.parallel(seeded(Plain, Noise()))
fit(model, sgd(model), batches_of(Points()))
