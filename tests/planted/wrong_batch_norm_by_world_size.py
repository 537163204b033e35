"""Batch norm is synchronised where there are several processes, and not where there is one."""

from parts import Net, Points, batches_of, fit, seeded, sgd

import samestep

with samestep.start() as world:
    model = seeded(Net)
    rules = samestep.StepRules(batch_norm="sync" if world.size > 1 else "shard")
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world, rules=rules)
    fit(engine, batches_of(world, Points()))
