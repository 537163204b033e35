# expect: whole: writes mean differently for a part of the rows
# The forward uses a running mean that it has just moved.
import torch
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Centring(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()
        self.register_buffer("mean", torch.zeros(12))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return self.net(x - self.mean)


model = Centring()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses, model)
