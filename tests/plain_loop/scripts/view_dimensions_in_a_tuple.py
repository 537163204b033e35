# expect: mixed
# Modules of one class that differ in a closure, a partial function or a tuple of dimensions: some join the samples.
from functools import partial

import torch
import torch.nn.functional as F
from common import report, train
from torch import nn


class Apply(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return x - self.function(x)


class Normalize(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.dims = dims

    def forward(self, x):
        return (x - x.mean(self.dims, keepdim=True)) / (1 + x.std(self.dims, keepdim=True))


def closure(dim):
    return lambda x: x.mean(dim, keepdim=True)


layers = [Apply(closure(dim)) for dim in (1, 0)]
layers += [Apply(partial(torch.mean, dim=dims, keepdim=True)) for dims in ((1,), (0,))]
layers += [Normalize(dims) for dims in ((1,), (0,), (0, 1))]
for layer in layers:
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(12, 16), layer, nn.Tanh(), nn.Linear(16, 4))
    # + model = samestep.parallel(model)
    losses = train(model, lambda x, y, model=model: F.cross_entropy(model(x), y), count=6)
    report(losses, model)
