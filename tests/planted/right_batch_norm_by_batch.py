"""Synchronised batch norm, with dropout behind it."""

from parts import Net, Points, batches_of, evaluation, fit, seeded, sgd

import samestep

with samestep.start() as world:
    model = seeded(Net)
    rules = samestep.StepRules(batch_norm="sync")
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world, rules=rules)
    fit(engine, batches_of(world, Points()))
    engine.evaluate(evaluation(world))
