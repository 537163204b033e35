"""The seed of the order is the number of processes."""

import torch
from parts import Net, Points, fit, seeded, sgd
from torch.utils.data import DataLoader

import samestep

world = samestep.init()
model = samestep.parallel(seeded(Net))
order = torch.Generator().manual_seed(world.size)
fit(model, sgd(model), DataLoader(Points(), batch_size=32, shuffle=True, generator=order))
