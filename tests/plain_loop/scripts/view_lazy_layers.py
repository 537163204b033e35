# expect: divided
# Lazy layers get their parameters in the first call; the script draws random numbers afterwards.
import torch
import torch.nn.functional as F
from common import batches, report, sgd
from torch import nn

model = nn.Sequential(nn.LazyLinear(16), nn.Tanh(), nn.LazyLinear(4))
# + model = samestep.parallel(model)
optimizer = None
losses = []
for x, y in batches():
    if optimizer is not None:
        chosen = torch.randperm(len(x))[:9]
        x = x[chosen]
        y = y[chosen]
    loss = F.cross_entropy(model(x), y)
    if optimizer is None:
        optimizer = sgd(model)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
