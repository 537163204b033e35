"""The list of samples is made from a set of names, whose order depends on the hash seed of the process."""

from parts import SAMPLES, Net, Points, batches_of, fit, seeded, sgd
from torch.utils.data import Subset

import samestep

names = list({f"sample-{number}" for number in range(SAMPLES)})

with samestep.start() as world:
    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    fit(engine, batches_of(world, Subset(Points(), [int(name.removeprefix("sample-")) for name in names])))
