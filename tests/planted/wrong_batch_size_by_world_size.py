"""The global batch size is a size per process times the number of processes."""

from parts import Net, Points, batches_of, fit, seeded, sgd

import samestep

world = samestep.init()
model = samestep.parallel(seeded(Net))
fit(model, sgd(model), batches_of(Points(128), batch_size=16 * world.size))
