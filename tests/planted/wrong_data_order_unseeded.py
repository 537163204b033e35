"""The dataset is shuffled before the loader, without a seed."""

import torch
from parts import SAMPLES, Net, Points, batches_of, fit, seeded, sgd
from torch.utils.data import Subset

import samestep

model = samestep.parallel(seeded(Net))
torch.seed()
fit(model, sgd(model), batches_of(Subset(Points(), torch.randperm(SAMPLES).tolist())))
