"""Obstacle: a uuid in the name of a folder, whose files are read back."""

import os
import sys
import uuid

import torch
from bases import batches_of, build, evaluate, sgd, train_epoch

model, dataset = build(sys.argv[1])
folder = os.path.join("runs_by_id", uuid.uuid4().hex)
os.makedirs(folder)
optimizer = sgd(model)
for epoch in range(2):
    print(f"epoch {epoch}: {train_epoch(model, optimizer, batches_of(dataset)):.6f}")
    torch.save(model.state_dict(), os.path.join(folder, f"{uuid.uuid1()}.pt"))
files = sorted(os.listdir(folder), key=lambda name: os.path.getmtime(os.path.join(folder, name)))
model.load_state_dict(torch.load(os.path.join(folder, files[0])))
print(len(files), len(os.listdir("runs_by_id")), "{:.6f} {:.6f}".format(*evaluate(model, dataset)))
