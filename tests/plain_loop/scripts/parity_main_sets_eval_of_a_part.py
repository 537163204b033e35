# expect: error: E_RANK_SETTINGS
# Rank 0 leaves a dropout layer in evaluation mode.
import os

import torch.nn.functional as F
from common import batches, report, sgd
from torch import nn

is_first_of_several = os.environ.get("RANK") == "0" and int(os.environ["WORLD_SIZE"]) > 1

model = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 4))
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for step, (x, y) in enumerate(batches()):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if is_first_of_several:
        model[2].eval()
report(losses, model)
