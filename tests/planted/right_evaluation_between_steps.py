"""Evaluations by hand between steps, with a metric that compares samples."""

import torch
from parts import Net, Points, batches_of, seeded, sgd, step
from torch.utils.data import DataLoader

import samestep

model = samestep.parallel(seeded(Net))
optimizer = sgd(model)
for batch in batches_of(Points()):
    model.train()
    step(model, optimizer, batch)
    model.eval()
    with torch.no_grad():
        ranks = torch.cat([model(inputs)[:, 0] for inputs, _ in DataLoader(Points(27, noise=0.0), batch_size=10)])
    print("order of the largest:", ranks.argsort()[:3].tolist())
