"""Shuffling with a constant seed; two epochs with different orders."""

from parts import Net, Points, batches_of, fit, seeded, sgd

import samestep

with samestep.start() as world:
    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    batches = batches_of(world, Points(), seed=5)
    fit(engine, batches)
    fit(engine, batches)
