"""Obstacle: the script creates a process group, of one process if no launcher has set its variables."""

import os
import sys
import tempfile

import torch.distributed as dist
from bases import batches_of, build, evaluate, sgd, train_epoch

model, dataset = build(sys.argv[1])
store = f"file://{tempfile.mkdtemp()}/store"
rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
dist.init_process_group("gloo", init_method=store, rank=rank, world_size=size)  # named
optimizer = sgd(model)
print(f"{train_epoch(model, optimizer, batches_of(dataset)):.6f}")
print("{:.6f} {:.6f}".format(*evaluate(model, dataset)))
dist.destroy_process_group()
