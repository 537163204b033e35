# expect: whole: writes statistics differently for a part of the rows
# A running mean in a dict.
import torch
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Centring(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()
        self.statistics = {"mean": torch.zeros(12)}

    def forward(self, x):
        if self.training:
            self.statistics["mean"].mul_(0.9).add_(x.mean(0), alpha=0.1)
        return self.net(x - self.statistics["mean"])


model = Centring()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses, model)
