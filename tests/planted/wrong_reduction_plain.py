"""Gradients meet as they come, though the same bits are wanted."""

from parts import Net, Points, batches_of, fit, seeded, sgd

import samestep

with samestep.start(reduction="fast") as world:
    model = seeded(Net)
    rules = samestep.StepRules(reduction="fast")
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world, rules=rules)
    fit(engine, batches_of(world, Points()))
