# expect: error: E_RANK_SETTINGS E_RANK_MISMATCH E_RANK_DESYNC
# Rank 0 leaves a dropout layer in evaluation mode.
import os

import torch.nn.functional as F
from common import batches, report, sgd
from torch import nn

model = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 4))
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for x, y in batches():
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if os.environ.get("RANK", "0") == "0" and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        model[2].eval()
report(losses, model)
