# expect: divided
# Label noise, mixup and cutmix by turns, with torch, numpy and Python generators in the loop.
import random

import numpy as np
import torch
from common import report
from torch import nn
from torch.nn import functional as F

model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3))
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range(9):
    x, y = torch.randn(10, 1, 8, 8), torch.randint(0, 3, (10,))
    order, share = torch.randperm(10), 0.0
    if step % 3 == 0:
        share = 1 - np.random.beta(0.4, 0.4)
        x = (1 - share) * x + share * x[order]
    elif step % 3 == 1:
        top, left = random.randrange(5), random.randrange(5)
        x[:, :, top : top + 4, left : left + 4] = x[order, :, top : top + 4, left : left + 4]
        share = 16 / 64
    else:
        y = torch.where(torch.rand(10) < 0.3, torch.randint(0, 3, (10,)), y)
    logits = model(x)
    loss = (1 - share) * F.cross_entropy(logits, y) + share * F.cross_entropy(logits, y[order])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
