"""The seed of the weights is the number of processes."""

import torch
from parts import Net, Points, batches_of, fit, sgd

import samestep

world = samestep.init()
torch.manual_seed(world.size)
model = Net()
model = samestep.parallel(model)
fit(model, sgd(model), batches_of(Points()))
