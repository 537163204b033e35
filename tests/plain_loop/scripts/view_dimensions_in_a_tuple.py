# expect: mixed
# Two models of one class, which differ in a tuple of dimensions: one normalizes each sample, the other the batch.
import torch
import torch.nn.functional as F
from common import report, train
from torch import nn


class Normalize(nn.Module):
    def __init__(self, dims):
        super().__init__()
        self.dims = dims

    def forward(self, x):
        return (x - x.mean(self.dims, keepdim=True)) / (1 + x.std(self.dims, keepdim=True))


def build(dims):
    return nn.Sequential(nn.Linear(12, 16), Normalize(dims), nn.Linear(16, 4))


losses = []
for dims in ((1,), (0,), (0, 1)):
    torch.manual_seed(3)
    model = build(dims)
    # + model = samestep.parallel(model)
    losses += train(model, lambda x, y, model=model: F.cross_entropy(model(x), y), count=6)
    report(losses, model)
