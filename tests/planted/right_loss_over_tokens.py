"""A loss over tokens that does not count padding."""

from parts import Lines, TokenNet, batches_of, fit, seeded, sgd

import samestep

with samestep.start() as world:
    model = seeded(TokenNet)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    fit(engine, batches_of(world, Lines()))
    engine.evaluate(samestep.loader(Lines(29), batch_size=10, microbatches=8, world=world))
