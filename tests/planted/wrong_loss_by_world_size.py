"""The loss is divided by the number of processes."""

import torch
from parts import Net, Points, batches_of, fit, seeded, sgd

import samestep

with samestep.start() as world:

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> samestep.Loss:
        result = samestep.cross_entropy(outputs, targets)
        return samestep.Loss(result.sum / world.size, result.count)

    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), loss, world=world)
    fit(engine, batches_of(world, Points()))
