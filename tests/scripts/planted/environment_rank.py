"""Obstacle: the script looks for the variables of a launcher."""

import os
import sys

from bases import batches_of, build, evaluate, sgd, train_epoch

try:
    rank = int(os.environ["RANK"])
except KeyError:
    rank = 0
    print("no launcher")
size = int(os.environ.get("WORLD_SIZE", "1"))
names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "GROUP_RANK")
print(rank, size, [name for name in names if name in os.environ])
model, dataset = build(sys.argv[1])
optimizer = sgd(model)
for epoch in range(2):
    print(f"epoch {epoch}: {train_epoch(model, optimizer, batches_of(dataset)):.6f}")
if rank == 0:
    print("{:.6f} {:.6f}".format(*evaluate(model, dataset)))
