"""The script sums gradients over ranks, as with its own process group."""

from parts import Plain, Points, batches_of, seeded, sgd
from torch.nn import functional

import samestep

world = samestep.init()
model = samestep.parallel(seeded(Plain))
optimizer = sgd(model)
for inputs, targets in batches_of(Points()):
    optimizer.zero_grad()
    functional.cross_entropy(model(inputs), targets).backward()
    for parameter in model.parameters():
        world.all_reduce(parameter.grad)
    optimizer.step()
