"""A learning rate that scales with the global batch, and two parameter groups."""

import torch
from parts import BATCH, Net, Points, batches_of, fit, seeded

import samestep

model = seeded(Net)
lr = 0.1 * BATCH / 256
groups = [
    {"params": list(model[0].parameters())},
    {"params": [*model[1].parameters(), *model[4].parameters()], "lr": lr / 2},
]
optimizer = torch.optim.SGD(groups, lr=lr, momentum=0.9)
model = samestep.parallel(model)
fit(model, optimizer, batches_of(Points()))
