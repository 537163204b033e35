# expect: divided
# The script calls `model.forward`, another method and a part of the model, next to the model itself.
import torch
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = perceptron(12, 8)
        self.head = nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(8))

    def encode(self, x):
        return self.features(x) * self.scale

    def forward(self, x):
        return self.head(self.encode(x))


model = Net()
# + model = samestep.parallel(model)


def loss_function(x, y):
    direct = F.cross_entropy(model.forward(x), y)
    penalty = model.encode(x).square().mean()
    with torch.no_grad():
        level = model.encode(x).mean()
    penalty = penalty + 0.01 * level * model.features(x).square().mean()
    return direct + penalty + 0.1 * F.cross_entropy(model(x), y)


losses = train(model, loss_function)
report(losses, model)
