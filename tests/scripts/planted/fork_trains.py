"""Obstacle: a forked child trains."""

import os
import sys

import torch
from bases import batches_of, build, evaluate, sgd
from torch.nn import functional as F

torch.set_num_threads(1)  # no threads before the fork
model, dataset = build(sys.argv[1])
sys.stdout.flush()
child = os.fork()
if child == 0:
    optimizer = sgd(model)
    for x, y in batches_of(dataset):
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), "child.pt")
    os._exit(0)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
model.load_state_dict(torch.load("child.pt"))
print("{:.6f} {:.6f}".format(*evaluate(model, dataset)))
