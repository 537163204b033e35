"""The limit of the gradient's norm is multiplied by the number of processes."""

from parts import Net, Points, batches_of, fit, seeded, sgd

import samestep

with samestep.start() as world:
    model = seeded(Net)
    rules = samestep.StepRules(clip_norm=0.1 * world.size)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world, rules=rules)
    fit(engine, batches_of(world, Points()))
