# expect: whole: uses a tensor with a graph that is not an argument
# A second network generates a weight that is set as an attribute before each call.
import torch
import torch.nn.functional as F
from common import perceptron, report, sgd, train
from torch import nn


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()
        self.gain = None

    def forward(self, x):
        return self.net(x * self.gain)


model = Scaled()
hyper = nn.Linear(3, 12)
# + model = samestep.parallel(model)
condition = torch.randn(3)


def loss_function(x, y):
    model.gain = hyper(condition)
    return F.cross_entropy(model(x), y)


losses = train(model, loss_function, sgd(model, hyper))
report(losses, model, hyper)
