"""The learning rate is halved between two steps on rank 0 only."""

from parts import Net, Points, batches_of, seeded, sgd

import samestep

with samestep.start() as world:
    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    for batch in batches_of(world, Points()):
        result = engine.step(batch)
        if world.is_main and world.size > 1 and result.step == 2:
            engine.optimizer.param_groups[0]["lr"] /= 2
