"""The schedule counts the steps that each rank would make with its own batch."""

from parts import Net, Points, batches_of, fit, seeded, sgd
from torch.optim.lr_scheduler import StepLR

import samestep

world = samestep.init()
model = samestep.parallel(seeded(Net))
optimizer = sgd(model)
schedule = StepLR(optimizer, step_size=max(1, 4 // world.size), gamma=0.5)
fit(model, optimizer, batches_of(Points()), schedule=schedule)
