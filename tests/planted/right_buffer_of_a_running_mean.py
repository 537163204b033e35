"""A running mean in a persistent buffer, which steps average over microbatches."""

import torch
from parts import Plain, Points, batches_of, fit, seeded, sgd
from torch import nn

import samestep


class Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("mask", torch.ones(16, dtype=torch.bool), persistent=False)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * values.detach().mean(0)
        return (values - self.mean) * self.mask


model = samestep.parallel(seeded(Plain, Centred()))
fit(model, sgd(model), batches_of(Points()))
