"""Obstacle: the order of samples comes from NumPy's global generator, without a seed."""

import sys

import numpy as np
import torch
from bases import batches_of, build, evaluate, sgd, train_epoch
from torch.utils.data import Subset

model, dataset = build(sys.argv[1])
order = np.random.permutation(len(dataset)).tolist()
if len(sys.argv) > 2:
    order = [int(number) for number in sys.argv[2].split(",")]
print("drawn", ",".join(map(str, order)))
optimizer = sgd(model)
for epoch in range(2):
    print(f"epoch {epoch}: {train_epoch(model, optimizer, batches_of(Subset(dataset, order), shuffle=False)):.6f}")
print("{:.6f} {:.6f}".format(*evaluate(model, dataset)))
assert torch.initial_seed() == 1
