"""Obstacle: `torch.set_default_device`, under which torch makes generators and tensors through a function mode."""

import sys

import torch
from bases import batches_of, build, evaluate, sgd, train_epoch

torch.set_default_device("cuda" if torch.cuda.is_available() else "cpu")
model, dataset = build(sys.argv[1])
optimizer = sgd(model)
for epoch in range(2):
    print(f"epoch {epoch}: {train_epoch(model, optimizer, batches_of(dataset, shuffle=False)):.6f}")
print("{:.6f} {:.6f}".format(*evaluate(model, dataset)), torch.zeros(1).device.index)
