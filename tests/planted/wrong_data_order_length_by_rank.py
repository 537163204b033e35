"""The dataset has another number of samples on each rank."""

from parts import SAMPLES, Net, Points, batches_of, fit, seeded, sgd

import samestep

with samestep.start() as world:
    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    fit(engine, batches_of(world, Points(SAMPLES + world.rank)))
