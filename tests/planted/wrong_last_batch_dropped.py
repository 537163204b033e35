"""A last batch that the number of processes does not divide is skipped."""

from parts import Net, Points, batches_of, seeded, sgd

import samestep

with samestep.start() as world:
    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    for batch in batches_of(world, Points()):
        if batch.size % world.size == 0:
            engine.step(batch)
