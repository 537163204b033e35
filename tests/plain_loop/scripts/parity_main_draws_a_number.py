# expect: error: E_RANK_SETTINGS E_RANK_MISMATCH E_RANK_DESYNC E_RANK_BATCH
# Rank 0 draws a random number between steps.
import torch
import torch.nn.functional as F
from common import batches, is_first_of_several, report, sgd, update
from torch import nn

model = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 4))
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for step, (x, y) in enumerate(batches()):
    loss = F.cross_entropy(model(x), y)
    losses.append(update(optimizer, loss))
    if is_first_of_several:
        torch.rand(1)
report(losses, model)
