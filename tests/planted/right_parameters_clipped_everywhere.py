"""Weights are clamped after each step on every rank; gradients are accumulated, and clipped by their norm."""

import torch
from parts import Net, Points, batches_of, seeded, sgd
from torch import nn

import samestep

model = samestep.parallel(seeded(Net))
optimizer = sgd(model)
for number, (inputs, targets) in enumerate(batches_of(Points())):
    (nn.functional.cross_entropy(model(inputs), targets) / 2).backward()
    if number % 2:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)
