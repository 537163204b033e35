"""A schedule that counts steps of the global batch."""

from parts import Net, Points, batches_of, fit, seeded, sgd
from torch.optim.lr_scheduler import CosineAnnealingLR

import samestep

model = seeded(Net)
optimizer = sgd(model)
batches = batches_of(Points())
schedule = CosineAnnealingLR(optimizer, T_max=2 * len(batches))
model = samestep.parallel(model)
fit(model, optimizer, batches)
