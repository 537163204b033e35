# expect: whole: an autograd function whose backward keeps state
# An autograd function counts its backwards; the model is called twice before each of them.
import torch
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn

seen = {"calls": 0}


class Count(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        seen["calls"] += 1
        return gradient * (1 + 0.1 / seen["calls"])


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, x):
        return Count.apply(self.net(x))


model = Net()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y) + F.cross_entropy(model(1.1 * x), y))
report([*losses, seen["calls"]], model)
