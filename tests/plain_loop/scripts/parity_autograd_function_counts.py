# expect: whole
# An autograd function counts its backwards and scales the gradient.
import torch
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Count(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Count.calls += 1
        return gradient * (1 + 0.1 / (1 + Count.calls))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, x):
        return Count.apply(self.net(x))


model = Net()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses, model)
