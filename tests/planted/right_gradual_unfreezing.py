"""The first layer is frozen until the second epoch, after the engine was made."""

from parts import Plain, Points, batches_of, fit, seeded, sgd

import samestep

with samestep.start() as world:
    model = seeded(Plain)
    model[0].requires_grad_(False)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    batches = batches_of(world, Points())
    fit(engine, batches)
    model[0].requires_grad_(True)
    fit(engine, batches)
