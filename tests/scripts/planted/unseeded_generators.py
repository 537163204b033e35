"""Obstacle: an instance of Random and a Generator of NumPy, both without seeds."""

import json
import random
import sys

import numpy as np
import torch
from bases import batches_of, build, evaluate, train_epoch
from torch.utils.data import Subset

model, dataset = build(sys.argv[1])
own = random.Random()
rate, momentum, keep = (
    own.uniform(0.01, 0.1),
    float(np.random.default_rng().uniform(0, 0.9)),
    own.sample(range(240), 160),
)
if len(sys.argv) > 2:
    rate, momentum, *keep = json.loads(f"[{sys.argv[2]}]")
print("drawn", json.dumps([rate, momentum, *keep])[1:-1])
optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=momentum)
subset = Subset(dataset, keep)
for epoch in range(3):
    print(f"epoch {epoch}: {train_epoch(model, optimizer, batches_of(subset)):.6f}")
print("{:.6f} {:.6f}".format(*evaluate(model, dataset)))
