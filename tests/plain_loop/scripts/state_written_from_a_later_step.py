# expect: divided
# From some step on the forward appends, counts in a tensor and a buffer, and draws from Python's generator.
import random

import torch
import torch.nn.functional as F
from common import batches, perceptron, report, sgd, update
from torch import nn


class Late(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()
        self.step = 10
        self.history = []
        self.count = torch.zeros(())
        self.register_buffer("writes", torch.zeros(3))

    def forward(self, x):
        scale = 1.0
        if self.step >= 14:
            self.history.append(self.step)
            scale += 0.1 * len(self.history)
        if self.step >= 15:
            scale += 0.1 * random.random()
        if self.step >= 16:
            with torch.no_grad():
                self.count.add_(1)
                self.writes.add_(1)
        return self.net(x) * (scale + 0.1 * self.count + 0.1 * self.writes.sum())


model = Late()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for x, y in batches():
    loss = F.cross_entropy(model(x), y)
    update(optimizer, loss)
    model.step += 1
    losses.append(loss.item())
report([*losses, len(model.history), random.random(), model.count], model)
