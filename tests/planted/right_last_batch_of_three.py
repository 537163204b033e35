"""A last batch with fewer samples than microbatches and ranks."""

from parts import Plain, Points, batches_of, fit, seeded, sgd

import samestep

model = samestep.parallel(seeded(Plain))
fit(model, sgd(model), batches_of(Points(67)))
