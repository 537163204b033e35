"""The rank is the seed of the initial weights."""

import torch
from parts import Net, Points, batches_of, fit, sgd

import samestep

world = samestep.init()
torch.manual_seed(world.rank)
model = Net()
model = samestep.parallel(model)
fit(model, sgd(model), batches_of(Points()))
