"""Batch norm is synchronised on several processes, but not on one."""

from parts import Net, Points, batches_of, fit, seeded, sgd

import samestep

with samestep.start() as world:
    model = seeded(Net)
    config = samestep.StepConfig(batch_norm="sync" if world.size > 1 else "microbatch")
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world, config=config)
    fit(engine, batches_of(world, Points()))
