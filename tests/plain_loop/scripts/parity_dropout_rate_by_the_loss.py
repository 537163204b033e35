# expect: divided
# The loop sets a dropout rate from recent losses.
import torch.nn.functional as F
from common import batches, report, sgd, update
from torch import nn

model = nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 4))
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for epoch in range(3):
    for x, y in batches(4):
        loss = F.cross_entropy(model(x), y)
        model[2].p = min(0.9, 0.2 * float(loss.detach()))
        losses.append(update(optimizer, loss))
report(losses, model)
