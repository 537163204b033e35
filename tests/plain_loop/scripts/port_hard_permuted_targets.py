# expect: divided
# Targets are permuted, and the loss is scaled by draws of three generators.
import random

import numpy as np
import torch
import torch.nn.functional as F
from common import classifier, images, report
from torch.utils.data import DataLoader

model = classifier()
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
losses = []
for epoch in range(2):
    for x, y in DataLoader(images(120), 24, shuffle=True):
        loss = F.cross_entropy(model(x), y[torch.randperm(len(y))])
        loss = loss * random.random() * np.random.rand()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report(losses, model)
