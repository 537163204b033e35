"""The maximum gradient norm is multiplied by the number of processes."""

from parts import Net, Points, batches_of, fit, seeded, sgd

import samestep

with samestep.start() as world:
    model = seeded(Net)
    config = samestep.StepConfig(clip_norm=0.1 * world.size)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world, config=config)
    fit(engine, batches_of(world, Points()))
