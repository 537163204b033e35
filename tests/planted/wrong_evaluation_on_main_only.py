"""Only rank 0 evaluates."""

from parts import Net, Points, batches_of, evaluation, seeded, sgd

import samestep

with samestep.start() as world:
    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    for batch in batches_of(world, Points()):
        result = engine.step(batch)
        if world.is_main and result.step == 3:
            engine.evaluate(evaluation(world))
