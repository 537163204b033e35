"""The learning rate is halved between two steps on rank 0 only."""

from parts import Net, Points, batches_of, seeded, sgd, step

import samestep

world = samestep.init()
model = samestep.parallel(seeded(Net))
optimizer = sgd(model)
for number, batch in enumerate(batches_of(Points())):
    step(model, optimizer, batch)
    if world.is_main and world.size > 1 and number == 1:
        optimizer.param_groups[0]["lr"] /= 2
