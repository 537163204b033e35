"""A script with a run: `replayed_loop.py NAME CHECKPOINTS [CHECKSUM_EVERY]`.

A weight changes after step 6 of the run `other`, and of any run while the file `fault` exists.
"""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import samestep

name, uses_checkpoints = sys.argv[1], sys.argv[2] == "True"
checksum_every = int(sys.argv[3]) if len(sys.argv) > 3 else 1
torch.manual_seed(0)
inputs = torch.randn(48, 20)
data = TensorDataset(inputs, inputs[:, :5].argmax(dim=1))
model = nn.Sequential(nn.Linear(20, 16), nn.Dropout(0.1), nn.Linear(16, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with samestep.start(run=name, checksum_every=checksum_every, device="cpu") as world:
    engine = samestep.Engine(model, optimizer, nn.CrossEntropyLoss(), world=world)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    batches = samestep.loader(data, batch_size=12, microbatches=4, shuffle=True, world=world)
    state = {"schedule": schedule}
    if uses_checkpoints:
        manager = samestep.CheckpointManager(Path("runs") / name / "checkpoints", engine, batches, state=state, keep=9)
    for _ in manager.epochs(3) if uses_checkpoints else samestep.epochs(batches, 3):
        for batch in batches:
            result = engine.step(batch)
            schedule.step()
            if result.step == 6 and (name == "other" or Path("fault").exists()):
                with torch.no_grad():
                    model[2].bias[1] += 1.0
    print(f"trained {engine.steps} steps")
