"""Fast reduction under a verification of equal bits."""

from parts import Net, Points, batches_of, fit, seeded, sgd

import samestep

model = samestep.parallel(seeded(Net))
fit(model, sgd(model), batches_of(Points()))
