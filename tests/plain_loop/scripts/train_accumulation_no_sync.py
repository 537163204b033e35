# expect: divided
# Accumulation that exchanges gradients once per step.
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from common import batches, perceptron, report
from torch import nn

model = perceptron()
without_exchange = nullcontext
# + model = samestep.parallel(model)
# + without_exchange = lambda: samestep.no_sync(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
losses = []
for number, (x, y) in enumerate(batches(16), 1):
    last = number % 4 == 0
    with nullcontext() if last else without_exchange():
        loss = F.cross_entropy(model(x), y) / 4
        loss.backward()
    losses.append(loss.item())
    if last:
        losses.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
report(losses, model)
