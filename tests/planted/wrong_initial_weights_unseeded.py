"""The weights are not seeded."""

import torch
from parts import Net, Points, batches_of, fit, sgd

import samestep

with samestep.start() as world:
    torch.seed()
    model = Net()
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    fit(engine, batches_of(world, Points()))
