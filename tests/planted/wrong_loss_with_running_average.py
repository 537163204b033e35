"""The loss divides by a running average of earlier losses."""

import torch
from parts import Net, Points, batches_of, fit, seeded, sgd
from torch import nn

import samestep


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.average = 1.0

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> samestep.Loss:
        result = samestep.cross_entropy(outputs, targets)
        self.average = 0.9 * self.average + 0.1 * float(result.sum.detach()) / len(targets)
        return samestep.Loss(result.sum / self.average, result.count)


with samestep.start() as world:
    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), Scaled(), world=world)
    fit(engine, batches_of(world, Points()))
