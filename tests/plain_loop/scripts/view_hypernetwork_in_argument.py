# expect: divided
# Weights that another network generates are an argument.
import torch
import torch.nn.functional as F
from common import perceptron, report, sgd, train
from torch import nn


class Main(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron(12, 8)

    def forward(self, x, weight):
        return self.net(x) @ weight


model = Main()
hyper = perceptron(5, 32)
# + model = samestep.parallel(model)
code = torch.randn(5)
losses = train(
    model,
    lambda x, y: F.cross_entropy(model(x, hyper(code).view(8, 4)), y),
    sgd(model, hyper, lr=0.05),
)
report(losses, model, hyper)
