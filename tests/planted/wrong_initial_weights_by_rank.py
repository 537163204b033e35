"""The rank is the seed of the initial weights."""

import torch
from parts import Net, Points, batches_of, fit, sgd

import samestep

with samestep.start() as world:
    torch.manual_seed(world.rank)
    model = Net()
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    fit(engine, batches_of(world, Points()))
