"""A last batch that the number of processes does not divide is skipped."""

from parts import Net, Points, batches_of, seeded, sgd, step

import samestep

world = samestep.init()
model = samestep.parallel(seeded(Net))
optimizer = sgd(model)
for inputs, targets in batches_of(Points()):
    if len(inputs) % world.size == 0:
        step(model, optimizer, (inputs, targets))
