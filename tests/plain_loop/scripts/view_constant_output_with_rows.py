# expect: divided
# An output of five rows does not depend on the batch of ten rows.
import torch
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron(12, 5)
        self.classes = nn.Parameter(torch.randn(5, 3))

    def forward(self, x):
        return self.net(x), self.classes.tanh()


model = Net()
# + model = samestep.parallel(model)


def loss_function(x, y):
    out, classes = model(x)
    return F.cross_entropy(out, y) + (classes @ classes.T).square().mean()


losses = train(model, loss_function, rows=10)
report(losses, model)
