"""Obstacle: the best weights are in a temporary folder, which is deleted at the end."""

import os
import sys
import tempfile

import torch
from bases import batches_of, build, evaluate, sgd, train_epoch

model, dataset = build(sys.argv[1])
optimizer = sgd(model)
best = float("inf")
with tempfile.TemporaryDirectory() as folder:
    path = os.path.join(folder, "best.pt")
    for epoch in range(3):
        loss = train_epoch(model, optimizer, batches_of(dataset))
        print(f"epoch {epoch}: {loss:.6f}")
        if loss < best:
            best = loss
            torch.save(model.state_dict(), path)
    print(os.listdir(folder), os.path.getsize(path) > 1000)
    model.load_state_dict(torch.load(path))
print(os.path.exists(folder))
print("{:.6f} {:.6f}".format(*evaluate(model, dataset)))
