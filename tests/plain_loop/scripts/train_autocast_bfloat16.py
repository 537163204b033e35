# expect: divided
# tolerance: permuted
# Convolutions in bfloat16 by autocast: each rank rounds its part of a gradient.
import torch
import torch.nn.functional as F
from common import batches, report, update
from torch import nn

torch.set_default_dtype(torch.float32)
model = nn.Sequential(nn.Unflatten(1, (1, 12)), nn.Conv1d(1, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(80, 4))
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for x, y in batches():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(model(x.float()), y)
    losses.append(update(optimizer, loss))
report(losses, model)
