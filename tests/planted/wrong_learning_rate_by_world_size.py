"""The learning rate is multiplied by the number of processes, although the global batch is constant."""

from parts import Net, Points, batches_of, fit, seeded, sgd

import samestep

with samestep.start() as world:
    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model, lr=0.05 * world.size), samestep.cross_entropy, world=world)
    fit(engine, batches_of(world, Points()))
