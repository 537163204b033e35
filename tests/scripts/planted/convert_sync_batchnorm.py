"""Obstacle: batch norm is converted to that of several processes."""

import sys

from bases import batches_of, build, evaluate, sgd, train_epoch
from torch import nn

model, dataset = build(sys.argv[1])
model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
optimizer = sgd(model)
for epoch in range(2):
    print(f"epoch {epoch}: {train_epoch(model, optimizer, batches_of(dataset)):.6f}")
print("{:.6f} {:.6f}".format(*evaluate(model, dataset)))
