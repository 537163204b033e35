"""The dataset is shuffled before the loader, with a seed per rank."""

import torch
from parts import Net, Points, batches_of, fit, seeded, sgd
from torch.utils.data import Subset

import samestep

with samestep.start() as world:
    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    order = torch.randperm(117, generator=torch.Generator().manual_seed(world.rank)).tolist()
    fit(engine, batches_of(world, Subset(Points(noise=0.0), order)))
