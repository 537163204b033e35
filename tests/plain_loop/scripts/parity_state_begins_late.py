# expect: whole: turns values of rows into Python numbers
# State in a list matters from the fourth step on.
import torch
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Centring(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()
        self.seen = []
        self.register_buffer("steps", torch.tensor(0))

    def forward(self, x):
        if self.training:
            self.steps += 1
            self.seen.append(float(x.mean()))
        if int(self.steps) > 3:
            x = x - sum(self.seen) / len(self.seen)
        return self.net(x)


model = Centring()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses, model)
