# expect: divided
# LayerDrop: Python's generator decides once per call which blocks run.
import random

import torch
from common import report, update
from torch import nn


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        for block in self.blocks:
            if not self.training or random.random() < 0.7:
                x = x + torch.tanh(block(x))
        return self.head(x)


model = Skipping()
# + model = samestep.parallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []
for _ in range(20):
    loss = nn.functional.cross_entropy(model(torch.randn(11, 8)), torch.randint(0, 3, (11,)))
    losses.append(update(optimizer, loss))
report([*losses, random.random()], model)
