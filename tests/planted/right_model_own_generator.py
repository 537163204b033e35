"""A dropout layer draws from its own generator, which advances from microbatch to microbatch."""

import torch
from parts import Plain, Points, batches_of, fit, seeded, sgd
from torch import nn

import samestep


class OwnDropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return values
        return values * (torch.rand(values.shape, generator=self.generator) > 0.2)


model = samestep.parallel(seeded(Plain, OwnDropout()))
fit(model, sgd(model), batches_of(Points()))
