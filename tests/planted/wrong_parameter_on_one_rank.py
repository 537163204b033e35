"""Weights are clamped after each step on rank 0 only."""

import torch
from parts import Net, Points, batches_of, seeded, sgd, step

import samestep

world = samestep.init()
model = samestep.parallel(seeded(Net))
optimizer = sgd(model)
for batch in batches_of(Points()):
    step(model, optimizer, batch)
    if world.is_main and world.size > 1:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)
