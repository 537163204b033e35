"""Shuffling with a constant seed; two epochs with different orders."""

from parts import Net, Points, batches_of, fit, seeded, sgd

import samestep

model = samestep.parallel(seeded(Net))
batches = batches_of(Points(), seed=5)
fit(model, sgd(model), batches)
fit(model, sgd(model), batches)
