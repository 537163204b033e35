"""A penalty is added to every shard's sum, so it counts as often as there are shards."""

import torch
from parts import Net, Points, batches_of, fit, seeded, sgd

import samestep

with samestep.start() as world:
    model = seeded(Net)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> samestep.Loss:
        whole = samestep.cross_entropy(outputs, targets)
        penalty = sum(parameter.square().sum() for parameter in model.parameters())
        return samestep.Loss(whole.sum + 0.01 * penalty, whole.count)

    engine = samestep.Engine(model, sgd(model), loss, world=world)
    fit(engine, batches_of(world, Points()))
