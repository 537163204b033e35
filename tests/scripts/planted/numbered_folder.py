"""Obstacle: the folder of the run gets the next number after those that exist."""

import os
import sys

import torch
from bases import batches_of, build, evaluate, sgd, train_epoch

for _ in range(2):
    model, dataset = build(sys.argv[1])
    os.makedirs("experiments", exist_ok=True)
    folder = os.path.join("experiments", f"run{len(os.listdir('experiments'))}")
    os.mkdir(folder)
    print(folder)
    optimizer = sgd(model)
    for epoch in range(2):
        print(f"epoch {epoch}: {train_epoch(model, optimizer, batches_of(dataset)):.6f}")
    torch.save(model.state_dict(), os.path.join(folder, "model.pt"))
model.load_state_dict(torch.load("experiments/run0/model.pt"))
print("{:.6f} {:.6f}".format(*evaluate(model, dataset)), sorted(os.listdir("experiments")))
