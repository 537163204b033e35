# expect: whole: writes seen differently for a part of the rows
# The model keeps means of the batches in a list.
import torch
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Centring(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()
        self.seen = []

    def forward(self, x):
        if self.training:
            self.seen.append(x.mean().detach())
        if self.seen:
            x = x - torch.stack(self.seen[-10:]).mean()
        return self.net(x)


model = Centring()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses, model)
