"""A schedule that counts steps of the global batch."""

from parts import Net, Points, batches_of, fit, seeded, sgd
from torch.optim.lr_scheduler import CosineAnnealingLR

import samestep

with samestep.start() as world:
    model = seeded(Net)
    optimizer = sgd(model)
    batches = batches_of(world, Points())
    schedule = CosineAnnealingLR(optimizer, T_max=2 * len(batches))
    engine = samestep.Engine(
        model, optimizer, samestep.cross_entropy, world=world, scheduler=schedule, scheduler_interval="step"
    )
    fit(engine, batches)
