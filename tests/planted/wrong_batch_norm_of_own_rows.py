"""Batch norm has the statistics of the rows of a rank."""

from parts import Net, Points, batches_of, fit, seeded, sgd

import samestep

model = samestep.parallel(seeded(Net), batch_norm="local")
fit(model, sgd(model), batches_of(Points()))
