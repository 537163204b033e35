"""Dropout, and noise from torch's global generator."""

import torch
from parts import Plain, Points, batches_of, fit, seeded, sgd
from torch import nn

import samestep


class Noise(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + 0.1 * torch.randn_like(values) if self.training else values


model = samestep.parallel(seeded(Plain, Noise(), nn.Dropout(0.3)))
fit(model, sgd(model), batches_of(Points()))
