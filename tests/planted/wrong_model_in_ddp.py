"""The model is wrapped in DistributedDataParallel on several processes, by habit."""

from parts import Plain, Points, batches_of, fit, seeded, sgd
from torch.nn.parallel import DistributedDataParallel

import samestep

with samestep.start() as world:
    model = seeded(Plain)
    if world.size > 1:
        model = DistributedDataParallel(model)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    fit(engine, batches_of(world, Points()))
