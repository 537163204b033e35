"""Obstacle: the seed is the number of the process."""

import os
import random
import sys

import numpy as np
from bases import batches_of, build, evaluate, sgd, train_epoch

model, dataset = build(sys.argv[1])
seed = int(sys.argv[2]) if len(sys.argv) > 2 else os.getpid()
print("drawn", seed)
random.seed(seed)  # named
np.random.seed(seed)  # named
noise = np.random.normal(0, 0.1)
optimizer = sgd(model)
for epoch in range(2):
    for group in optimizer.param_groups:
        group["lr"] = 0.05 + 0.01 * random.random()
    print(f"epoch {epoch}: {train_epoch(model, optimizer, batches_of(dataset)):.6f}")
print(f"{noise:.6f} " + "{:.6f} {:.6f}".format(*evaluate(model, dataset)))
