"""Rank 0 has another optimizer than the other ranks."""

import torch
from parts import Net, Points, batches_of, fit, seeded, sgd

import samestep

with samestep.start() as world:
    model = seeded(Net)
    optimizer = sgd(model) if world.is_main else torch.optim.Adam(model.parameters())
    engine = samestep.Engine(model, optimizer, samestep.cross_entropy, world=world)
    fit(engine, batches_of(world, Points()))
