"""Obstacle: an exception that is not caught ends the script in the middle of training."""

import sys

from bases import batches_of, build, sgd, train_epoch

model, dataset = build(sys.argv[1])
optimizer = sgd(model)
for epoch in range(4):
    if epoch == 2:
        raise ValueError("no data for epoch 2")  # named
    print(f"epoch {epoch}: {train_epoch(model, optimizer, batches_of(dataset)):.6f}", flush=True)
