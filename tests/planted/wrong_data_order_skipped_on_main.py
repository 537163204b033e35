"""Rank 0 skips a batch."""

from parts import Net, Points, batches_of, seeded, sgd

import samestep

with samestep.start() as world:
    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    for number, batch in enumerate(batches_of(world, Points())):
        if number != 1 or not world.is_main or world.size == 1:
            engine.step(batch)
