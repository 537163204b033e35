"""A last batch with fewer samples than microbatches and ranks."""

from parts import Plain, Points, batches_of, fit, seeded, sgd

import samestep

with samestep.start() as world:
    model = seeded(Plain)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    fit(engine, batches_of(world, Points(67)))
