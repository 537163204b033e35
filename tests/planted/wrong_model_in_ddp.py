"""The model is wrapped in DistributedDataParallel on several processes, by habit."""

from parts import Plain, Points, batches_of, fit, seeded, sgd
from torch.nn.parallel import DistributedDataParallel

import samestep

world = samestep.init()
model = seeded(Plain)
if world.size > 1:
    model = DistributedDataParallel(model)
model = samestep.parallel(model)
fit(model, sgd(model), batches_of(Points()))
