# expect: mixed
# A nested dictionary and a plain tensor that count calls in place, in a forward that must sometimes be computed again.
import torch
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()
        self.stats = {"calls": {"number": 0}}
        self.calls = torch.zeros(())

    def forward(self, x):
        self.stats["calls"]["number"] += 1
        self.calls.add_(1)
        if (x > 2.9).any():
            x = x.clamp(max=2.9)
        return self.net(x) * (1 + 0.1 * self.stats["calls"]["number"] + 0.1 * self.calls)


model = Net()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report([*losses, model.calls, model.stats["calls"]["number"]], model)
