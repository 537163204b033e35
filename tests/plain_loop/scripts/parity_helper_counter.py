# expect: whole: changes the attribute anneal of Annealed
# A helper object counts its calls.
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Anneal:
    calls = 0

    def __call__(self):
        self.calls += 1
        return min(1.0, self.calls / 40)


class Annealed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()
        self.anneal = Anneal()

    def forward(self, x):
        out = self.net(x)
        if self.training:
            out = out * self.anneal()
        return out


model = Annealed()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses, model)
