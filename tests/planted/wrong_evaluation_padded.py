"""The evaluation set is padded to a multiple of the number of processes, and the padding counts."""

from parts import Net, Points, batches_of, fit, seeded, sgd
from torch.utils.data import Subset

import samestep

with samestep.start() as world:
    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    fit(engine, batches_of(world, Points()))
    padded = Subset(Points(31, noise=0.0), [*range(31), *range(-31 % world.size)])
    engine.evaluate(samestep.loader(padded, batch_size=16, microbatches=8, world=world))
