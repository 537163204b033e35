"""Obstacle: `nn.DataParallel` over two devices."""

import sys

import torch
from bases import batches_of, build, evaluate, sgd, train_epoch
from torch import nn

model, dataset = build(sys.argv[1])
model = nn.DataParallel(model, device_ids=[0, 1])
optimizer = sgd(model)
for epoch in range(2):
    print(f"epoch {epoch}: {train_epoch(model, optimizer, batches_of(dataset)):.6f}")
torch.save(model.module.state_dict(), "model.pt")
print(next(iter(model.state_dict())), "{:.6f} {:.6f}".format(*evaluate(model, dataset)))
