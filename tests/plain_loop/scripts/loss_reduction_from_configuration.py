# expect: mixed: joins samples
# Models of one class: the loss is a mean in one and a sum in the other, by a partial function and by a dataclass.
from dataclasses import dataclass
from functools import partial

import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


@dataclass
class Configuration:
    reduction: str


class Model(nn.Module):
    def __init__(self, criterion, configuration):
        super().__init__()
        self.net = perceptron()
        self.criterion, self.configuration = criterion, configuration

    def forward(self, x, y):
        out = self.net(x)
        return self.criterion(out, y) + 0.1 * F.l1_loss(out, x[:, :4], reduction=self.configuration.reduction)


for first, second in (("mean", "mean"), ("sum", "mean"), ("mean", "sum")):
    model = Model(partial(F.cross_entropy, reduction=first), Configuration(second))
    # + model = samestep.parallel(model)
    report(train(model, lambda x, y: model(x, y) / 10, count=5), model)  # noqa: B023
