"""Each rank makes other random samples."""

import torch
from parts import CLASSES, Net, Points, batches_of, fit, seeded, sgd

import samestep

with samestep.start() as world:
    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    points = Points()
    points.inputs = torch.randn(points.inputs.shape, generator=torch.Generator().manual_seed(world.rank))
    points.targets = points.inputs[:, :CLASSES].argmax(dim=1)
    fit(engine, batches_of(world, points))
