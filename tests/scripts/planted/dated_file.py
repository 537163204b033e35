"""Obstacle: names of files contain the time to the microsecond; they are read back by name and by pattern."""

import glob
import sys
from datetime import datetime

import torch
from bases import batches_of, build, evaluate, sgd, train_epoch

model, dataset = build(sys.argv[1])
optimizer = sgd(model)
for epoch in range(2):
    print(f"epoch {epoch}: {train_epoch(model, optimizer, batches_of(dataset)):.6f}")
    name = f"model_{epoch}_{datetime.now():%Y%m%d_%H%M%S_%f}.pt"
    torch.save(model.state_dict(), name)
for parameter in model.parameters():
    parameter.data.zero_()
model.load_state_dict(torch.load(name))
print("{:.6f} {:.6f}".format(*evaluate(model, dataset)))
model.load_state_dict(torch.load(min(glob.glob("model_*.pt"))))
print("{:.6f} {:.6f}".format(*evaluate(model, dataset)), len(glob.glob("model_*.pt")))
