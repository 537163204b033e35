"""The loss draws from torch's global generator, and counts its calls."""

import torch
from parts import Net, Points, batches_of, fit, seeded, sgd
from torch import nn

import samestep


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> samestep.Loss:
        self.calls += 1
        result = samestep.cross_entropy(outputs, targets)
        return samestep.Loss(result.sum + 0.01 * torch.randn(()) * outputs.square().sum(), result.count)


with samestep.start() as world:
    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), Noisy(), world=world)
    fit(engine, batches_of(world, Points()))
