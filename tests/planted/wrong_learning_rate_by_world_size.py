"""The learning rate is multiplied by the number of processes, although the global batch is constant."""

from parts import Net, Points, batches_of, fit, seeded, sgd

import samestep

world = samestep.init()
model = samestep.parallel(seeded(Net))
fit(model, sgd(model, lr=0.05 * world.size), batches_of(Points()))
