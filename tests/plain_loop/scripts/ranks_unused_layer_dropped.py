# expect: divided
# Layers that are left out of some batches, as Python's random numbers decide outside of the model.
import random

import torch
import torch.nn.functional as F
from common import report, train
from torch import nn


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.head = nn.Linear(12, 4)
        self.kept = [True, True, True]

    def forward(self, x):
        for layer, is_kept in zip(self.layers, self.kept, strict=True):
            if is_kept:
                x = x + torch.tanh(layer(x))
        return self.head(x)


model = Residual()
# + model = samestep.parallel(model)


def loss_function(x, y):
    model.kept[:] = [random.random() < 0.7 for _ in model.layers]
    return F.cross_entropy(model(x), y)


losses = train(model, loss_function, torch.optim.RMSprop(model.parameters(), 0.02, weight_decay=0.1, momentum=0.5), 20)
report(losses, model)
