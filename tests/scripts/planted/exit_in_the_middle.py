"""Obstacle: `sys.exit(3)` in the middle of training."""

import sys

from bases import batches_of, build, sgd, train_epoch

model, dataset = build(sys.argv[1])
optimizer = sgd(model)
for epoch in range(4):
    loss = train_epoch(model, optimizer, batches_of(dataset))
    print(f"epoch {epoch}: {loss:.6f}")
    if epoch == 1:
        sys.exit(3)
