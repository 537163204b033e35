"""A penalty is added to the sum of each microbatch, so that the penalty counts once per microbatch."""

import torch
from parts import Net, Points, batches_of, fit, seeded, sgd

import samestep

with samestep.start() as world:
    model = seeded(Net)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> samestep.Loss:
        result = samestep.cross_entropy(outputs, targets)
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        return samestep.Loss(result.sum + 0.01 * penalty, result.count)

    engine = samestep.Engine(model, sgd(model), loss, world=world)
    fit(engine, batches_of(world, Points()))
