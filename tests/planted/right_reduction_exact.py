"""Exact sums: the same bits on every number of processes."""

from parts import Net, Points, accuracy, batches_of, evaluation, fit, seeded, sgd

import samestep

samestep.init(reduction="exact")
model = samestep.parallel(seeded(Net), reduction="exact")
fit(model, sgd(model), batches_of(Points()))
accuracy(model, evaluation())
