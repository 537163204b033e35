"""Autocast to bfloat16."""

from parts import Net, Points, batches_of, fit, seeded, sgd

import samestep

with samestep.start() as world:
    model = seeded(Net)
    rules = samestep.StepConfig(precision="bf16")
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world, config=rules)
    fit(engine, batches_of(world, Points()))
