# expect: mixed
# A nested dictionary that the forward writes, in a forward that must sometimes be computed again.
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()
        self.stats = {"calls": {"number": 0}}

    def forward(self, x):
        self.stats["calls"]["number"] += 1
        if (x > 2.9).any():
            x = x.clamp(max=2.9)
        return self.net(x) * (1 + 0.1 * self.stats["calls"]["number"])


model = Net()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report([*losses, model.stats["calls"]["number"]], model)
