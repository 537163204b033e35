# expect: whole: writes features differently for a part of the rows
# A metric object keeps features of a network that the script never trains.
import torch
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class FeatureDistance(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron(12, 6)
        self.features = []

    def forward(self, x):
        self.features.append(self.net(x).detach())

    def compute(self):
        features = torch.cat(self.features)
        return features.mean(0).norm() + features.std(0).norm()


model = perceptron(12, 12)
metric = FeatureDistance()
# + metric = samestep.parallel(metric)


def loss_function(x, y):
    out = model(x)
    metric(out)
    return F.mse_loss(out, x)


losses = train(model, loss_function)
report([*losses, metric.compute()], model)
