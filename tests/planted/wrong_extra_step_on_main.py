"""Rank 0 makes one step more than the others."""

from parts import Net, Points, batches_of, fit, seeded, sgd

import samestep

with samestep.start() as world:
    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    batches = batches_of(world, Points())
    fit(engine, batches)
    if world.is_main and world.size > 1:
        engine.step(next(iter(batches)))
