"""The maximum gradient norm is multiplied by the number of processes."""

from parts import Net, Points, batches_of, seeded, sgd
from torch import nn

import samestep

world = samestep.init()
model = samestep.parallel(seeded(Net))
optimizer = sgd(model)
for inputs, targets in batches_of(Points()):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), targets).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1 * world.size)
    optimizer.step()
