"""Obstacle: the seed is the time."""

import sys
import time

import torch
from bases import batches_of, build, evaluate, sgd, train_epoch

model, dataset = build(sys.argv[1])
seed = int(sys.argv[2]) if len(sys.argv) > 2 else time.time_ns() % 2**31
print("drawn", seed)
torch.manual_seed(seed)  # named
optimizer = sgd(model)
for epoch in range(2):
    print(f"epoch {epoch}: {train_epoch(model, optimizer, batches_of(dataset)):.6f}")
print("{:.6f} {:.6f}".format(*evaluate(model, dataset)))
