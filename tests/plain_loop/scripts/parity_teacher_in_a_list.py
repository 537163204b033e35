# expect: whole: changes the attribute teacher of Taught
# A teacher in a list is moved in the forward.
import copy

import torch
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Taught(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()
        self.teacher = [copy.deepcopy(self.net)]

    def forward(self, x):
        with torch.no_grad():
            for own, other in zip(self.teacher[0].parameters(), self.net.parameters()):
                own.mul_(0.9).add_(other + x.mean(), alpha=0.1)
        return self.net(x) + 0.5 * self.teacher[0](x)


model = Taught()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses, model)
