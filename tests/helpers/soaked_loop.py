"""An own loop with a `CheckpointManager`, which saves each step and resumes: 96 steps.

It adds each step to `steps.txt`, and writes the SHA-256 of its weights and moments to `result.txt`.
"""

import hashlib
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep

samestep.init(device="cpu", reduction="exact")
torch.manual_seed(0)
inputs = torch.randn(768, 64)
data = TensorDataset(inputs, inputs[:, :5].argmax(dim=1))
layers = nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.Dropout(0.2), nn.Linear(512, 5))
model = samestep.parallel(layers)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
batches = samestep.loader(data, batch_size=96, shuffle=True, seed=3)
checkpoints = samestep.CheckpointManager("checkpoints", model, batches, optimizer=optimizer)
for _ in checkpoints.epochs(12):
    for rows, labels in batches:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(rows), labels).backward()
        optimizer.step()
        checkpoints.save()
        if samestep.is_main():
            with Path("steps.txt").open("a") as file:
                file.write("step\n")
if samestep.is_main():
    digest = hashlib.sha256()
    for group in (layers.state_dict(), *optimizer.state_dict()["state"].values()):
        for _, value in sorted(group.items()):
            digest.update(value.numpy().tobytes())
    Path("result.txt").write_text(digest.hexdigest())
