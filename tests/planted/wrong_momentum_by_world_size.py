"""The momentum depends on the number of processes."""

import torch
from parts import Net, Points, batches_of, fit, seeded

import samestep

with samestep.start() as world:
    model = seeded(Net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=1 - 0.1 * world.size)
    engine = samestep.Engine(model, optimizer, samestep.cross_entropy, world=world)
    fit(engine, batches_of(world, Points()))
