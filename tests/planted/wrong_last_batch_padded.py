"""The dataset is padded with its first samples to a multiple of the number of processes."""

from parts import SAMPLES, Net, Points, batches_of, fit, seeded, sgd
from torch.utils.data import Subset

import samestep

with samestep.start() as world:
    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    padded = [*range(SAMPLES), *range(-SAMPLES % world.size)]
    fit(engine, batches_of(world, Subset(Points(), padded), shuffle=False))
