"""The first layer is frozen until the second epoch."""

from parts import Plain, Points, batches_of, fit, seeded, sgd

import samestep

model = samestep.parallel(seeded(Plain))
model[0].requires_grad_(False)
optimizer = sgd(model)
batches = batches_of(Points())
fit(model, optimizer, batches)
model[0].requires_grad_(True)
fit(model, optimizer, batches)
