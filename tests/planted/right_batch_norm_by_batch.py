"""Synchronised batch norm followed by dropout."""

from parts import Net, Points, batches_of, evaluation, fit, seeded, sgd

import samestep

with samestep.start() as world:
    model = seeded(Net)
    config = samestep.StepConfig(batch_norm="sync")
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world, config=config)
    fit(engine, batches_of(world, Points()))
    engine.evaluate(evaluation(world))
