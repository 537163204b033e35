"""Fast reduction under a verification of equal bits."""

from parts import Net, Points, batches_of, fit, seeded, sgd

import samestep

with samestep.start(reduction="fast") as world:
    model = seeded(Net)
    config = samestep.StepConfig(reduction="fast")
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world, config=config)
    fit(engine, batches_of(world, Points()))
