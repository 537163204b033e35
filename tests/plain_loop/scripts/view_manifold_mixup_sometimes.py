# expect: mixed
# Manifold mixup inside of the model in a random part of the calls.
import random

import torch.nn.functional as F
from common import report, train
from torch import nn


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.second = nn.Linear(16, 4)

    def forward(self, x):
        h = self.first(x).tanh()
        if self.training and random.random() < 0.3:
            h = 0.7 * h + 0.3 * h.flip(0)
        return self.second(h)


model = Mixing()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y), count=25)
report([*losses, random.random()], model)
