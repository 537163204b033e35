"""Rank 0 leaves the loop after two steps."""

from parts import Net, Points, batches_of, seeded, sgd, step

import samestep

world = samestep.init()
model = samestep.parallel(seeded(Net))
optimizer = sgd(model)
for number, batch in enumerate(batches_of(Points())):
    if number == 2 and world.is_main and world.size > 1:
        break
    step(model, optimizer, batch)
