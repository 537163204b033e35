# expect: divided
# Weights and optimizer are saved in the middle, loaded into new objects, and the run goes on with those.
import io

import torch
import torch.nn.functional as F
from common import batches, report, update
from torch import nn


def build():
    return nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))


model = build()
# + model = samestep.parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
losses = []
for step, (x, y) in enumerate(batches(12)):
    if step == 6:
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        model = build()
        # + model = samestep.parallel(model)
        model.load_state_dict(saved["model"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        optimizer.load_state_dict(saved["optimizer"])
    loss = F.cross_entropy(model(x), y)
    losses.append(update(optimizer, loss))
report(losses, model)
