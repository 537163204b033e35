"""The dataset is shuffled before the loader, without a seed."""

import torch
from parts import SAMPLES, Net, Points, batches_of, fit, seeded, sgd
from torch.utils.data import Subset

import samestep

with samestep.start() as world:
    model = seeded(Net)
    engine = samestep.Engine(model, sgd(model), samestep.cross_entropy, world=world)
    torch.seed()
    fit(engine, batches_of(world, Subset(Points(), torch.randperm(SAMPLES).tolist())))
