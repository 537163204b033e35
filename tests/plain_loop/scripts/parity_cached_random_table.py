# expect: whole: keeps a tensor of the call outside of the module
# The first forward draws a random table, which a cache keeps.
import functools

import torch
import torch.nn.functional as F
from common import report, train
from torch import nn


@functools.lru_cache
def table(size):
    return torch.randn(size, 12)


class Features(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(16, 4)

    def forward(self, x):
        return self.out(torch.cos(x @ table(16).T))


model = Features()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses, model)
