"""Rank 0 draws a number that the other ranks do not draw."""

import torch
from parts import Net, Points, batches_of, seeded, sgd, step

import samestep

world = samestep.init()
model = samestep.parallel(seeded(Net))
optimizer = sgd(model)
for batch in batches_of(Points()):
    step(model, optimizer, batch)
    if world.is_main and world.size > 1:
        print(f"one of the samples is {int(torch.randint(117, ()))}")
