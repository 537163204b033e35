"""Two threads per rank on any number of ranks."""

from parts import Net, Points, batches_of, fit, seeded, sgd

import samestep

with samestep.start(threads=2) as world:
    model = seeded(Net)
    rules = samestep.StepConfig(threads=2)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world, config=rules)
    fit(engine, batches_of(world, Points()))
