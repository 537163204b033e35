"""The loss is divided by the number of processes."""

import torch
from parts import Net, Points, batches_of, fit, seeded, sgd
from torch.nn import functional

import samestep

world = samestep.init()


def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(outputs, targets) / world.size


model = samestep.parallel(seeded(Net))
fit(model, sgd(model), batches_of(Points()), loss=loss)
