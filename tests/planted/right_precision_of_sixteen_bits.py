"""Autocast to bfloat16."""

import torch
from parts import Plain, Points, batches_of, seeded, sgd
from torch.nn import functional

import samestep

model = samestep.parallel(seeded(Plain))
optimizer = sgd(model)
for inputs, targets in batches_of(Points()):
    optimizer.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = functional.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
