"""Two threads per rank on any number of ranks."""

from parts import Net, Points, batches_of, fit, seeded, sgd

import samestep

samestep.init(threads=2)
model = samestep.parallel(seeded(Net))
fit(model, sgd(model), batches_of(Points()))
