"""Each rank takes a part of the dataset, and the loader divides that part again."""

from parts import Net, Points, batches_of, fit, seeded, sgd
from torch.utils.data import Subset

import samestep

with samestep.start() as world:
    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    subset = Subset(Points(), range(world.rank, 116, world.size))
    fit(engine, batches_of(world, subset))
