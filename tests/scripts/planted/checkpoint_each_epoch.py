"""Obstacle: each epoch writes a checkpoint and goes on from what it reads."""

import os
import sys

import torch
from bases import batches_of, build, evaluate, sgd, train_epoch

model, dataset = build(sys.argv[1])
optimizer = sgd(model)
for epoch in range(3):
    if os.path.exists("checkpoint.pt"):
        state = torch.load("checkpoint.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        print("from epoch", state["epoch"])
    print(f"epoch {epoch}: {train_epoch(model, optimizer, batches_of(dataset)):.6f}")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
    torch.save(state, "checkpoint.tmp")
    os.replace("checkpoint.tmp", "checkpoint.pt")
    for parameter in model.parameters():
        parameter.data.zero_()
    optimizer = sgd(model)
model.load_state_dict(torch.load("checkpoint.pt")["model"])
print("{:.6f} {:.6f}".format(*evaluate(model, dataset)), sorted(os.listdir(".")))
