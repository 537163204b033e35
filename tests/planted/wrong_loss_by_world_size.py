"""The loss is divided by the number of processes, because somewhere it said that DDP sums."""

import torch
from parts import Net, Points, batches_of, fit, seeded, sgd

import samestep

with samestep.start() as world:

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> samestep.Loss:
        whole = samestep.cross_entropy(outputs, targets)
        return samestep.Loss(whole.sum / world.size, whole.count)

    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), loss, world=world)
    fit(engine, batches_of(world, Points()))
