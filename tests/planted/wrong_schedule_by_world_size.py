"""The schedule counts the steps that each rank would make with its own batch."""

from parts import Net, Points, batches_of, fit, seeded, sgd
from torch.optim.lr_scheduler import StepLR

import samestep

with samestep.start() as world:
    model = seeded(Net)
    optimizer = sgd(model)
    schedule = StepLR(optimizer, step_size=max(1, 4 // world.size), gamma=0.5)
    engine = samestep.Engine(
        model, optimizer, samestep.cross_entropy, world=world, scheduler=schedule, scheduler_interval="step"
    )
    fit(engine, batches_of(world, Points()))
