"""The number of microbatches, and with it the order of exact sums, is a multiple of the number of processes."""

from parts import Net, Points, batches_of, fit, seeded, sgd

import samestep

world = samestep.init(reduction="exact")
model = samestep.parallel(seeded(Net), reduction="exact", microbatches=2 * world.size)
fit(model, sgd(model), batches_of(Points()))
