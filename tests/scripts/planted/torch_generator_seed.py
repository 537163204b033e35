"""Obstacle: a generator of torch takes its seed from the operating system by a method in C++."""

import sys

import torch
from bases import build, evaluate, sgd, train_epoch
from torch.utils.data import DataLoader

model, dataset = build(sys.argv[1])
generator = torch.Generator()
generator.seed()
if len(sys.argv) > 2:
    generator.manual_seed(int(sys.argv[2]))
print("drawn", generator.initial_seed())
optimizer = sgd(model)
loader = DataLoader(dataset, batch_size=80, shuffle=True, generator=generator)
for epoch in range(2):
    print(f"epoch {epoch}: {train_epoch(model, optimizer, loader):.6f}")
print("{:.6f} {:.6f}".format(*evaluate(model, dataset)))
