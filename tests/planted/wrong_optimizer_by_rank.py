"""Rank 0 has another optimizer than the other ranks."""

import torch
from parts import Net, Points, batches_of, fit, seeded, sgd

import samestep

world = samestep.init()
model = seeded(Net)
optimizer = sgd(model) if world.is_main else torch.optim.Adam(model.parameters())
model = samestep.parallel(model)
fit(model, optimizer, batches_of(Points()))
