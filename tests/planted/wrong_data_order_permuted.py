"""The dataset is shuffled before the loader, with a seed per rank."""

import torch
from parts import Net, Points, batches_of, fit, seeded, sgd
from torch.utils.data import Subset

import samestep

world = samestep.init()
model = samestep.parallel(seeded(Net))
order = torch.randperm(117, generator=torch.Generator().manual_seed(world.rank)).tolist()
fit(model, sgd(model), batches_of(Subset(Points(noise=0.0), order)))
