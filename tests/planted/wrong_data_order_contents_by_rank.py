"""Each rank makes other random samples."""

import torch
from parts import CLASSES, Net, Points, batches_of, fit, seeded, sgd

import samestep

world = samestep.init()
model = samestep.parallel(seeded(Net))
points = Points()
points.inputs = torch.randn(points.inputs.shape, generator=torch.Generator().manual_seed(world.rank))
points.targets = points.inputs[:, :CLASSES].argmax(dim=1)
fit(model, sgd(model), batches_of(points))
