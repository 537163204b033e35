# expect: divided
# Python's and NumPy's generators decide once per call, before and after batch norm; the script draws from both, too.
import random

import numpy as np
import torch.nn.functional as F
from common import report, train
from torch import nn


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.norm = nn.BatchNorm1d(16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        x = self.first(x) * (0.5 + random.random())
        x = self.norm(x) * (1 + 0.1 * np.random.normal())
        for block in self.blocks:
            x = x + block(x).tanh() * random.random()
        return self.head(x) * np.random.uniform(0.5, 1.5)


model = Skipping()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y) * (0.5 + random.random()))
report([*losses, random.random(), np.random.rand(), np.random.normal()], model)
