# expect: divided
# Stochastic depth: one random number per row decides.
import torch
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron(12, 12)

    def forward(self, x):
        if not self.training:
            return x + self.net(x)
        keep = (torch.rand(len(x), 1) < 0.8).to(x.dtype)
        return x + keep * self.net(x) / 0.8


model = nn.Sequential(Block(), Block(), nn.Linear(12, 4))
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses, model)
