"""A penalty that is multiplied by the samples of a shard, so that it counts once in the mean."""

import torch
from parts import Net, Points, batches_of, fit, seeded, sgd

import samestep

with samestep.start() as world:
    model = seeded(Net)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> samestep.Loss:
        whole = samestep.cross_entropy(outputs, targets)
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        return samestep.Loss(whole.sum + 0.01 * penalty * len(targets), whole.count)

    engine = samestep.Engine(model, sgd(model), loss, world=world)
    fit(engine, batches_of(world, Points()))
