# expect: divided
# Random crops, flips and erasing in the loop with generators of torch, numpy and Python, and a generator object.
import random

import numpy as np
import torch
import torch.nn.functional as F
from common import images, report, sgd, update
from torch import nn
from torch.utils.data import DataLoader

own = torch.Generator().manual_seed(5)
model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(16, 5))
# + model = samestep.parallel(model)
optimizer = sgd(model, lr=0.05)
losses = []
for image, y in DataLoader(images(), batch_size=11, shuffle=True):
    top, left = random.randint(0, 2), int(np.random.randint(0, 3))
    x = image[:, :, top : top + 8, left : left + 8]
    x = torch.where(torch.rand(len(x), 1, 1, 1) < 0.5, x.flip(3), x)
    x = x * (torch.rand(x.shape, generator=own) > 0.1)
    loss = F.cross_entropy(model(x), y)
    losses.append(update(optimizer, loss))
report([*losses, random.random(), np.random.rand(), torch.rand(())], model)
