"""Only rank 0 evaluates."""

from parts import Net, Points, accuracy, batches_of, evaluation, seeded, sgd, step

import samestep

world = samestep.init()
model = samestep.parallel(seeded(Net))
optimizer = sgd(model)
for number, batch in enumerate(batches_of(Points())):
    step(model, optimizer, batch)
    if world.is_main and number == 2:
        accuracy(model, evaluation())
        model.train()
