"""Obstacle: parts of the data are taken in the order of a set of strings."""

import sys

import torch
from bases import build, evaluate, sgd
from torch.nn import functional as F

model, dataset = build(sys.argv[1])
names = list({"amber", "blue", "cyan", "green", "red", "white"})
if len(sys.argv) > 2:
    names = sys.argv[2].split(",")
print("drawn", ",".join(names))
parts = dict(zip(sorted(names), torch.arange(240).chunk(6), strict=True))
optimizer = sgd(model)
for name in names:
    x, y = (tensor[parts[name]] for tensor in dataset.tensors)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"{name}: {loss.item():.6f}")
print("{:.6f} {:.6f}".format(*evaluate(model, dataset)))
