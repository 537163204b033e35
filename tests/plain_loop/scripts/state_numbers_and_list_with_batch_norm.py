# expect: divided
# A forward with batch norm counts its calls, keeps a running mean of a norm as a number, and appends to a list.
import torch.nn.functional as F
from common import report, train
from torch import nn


class Kept(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.BatchNorm1d(16), nn.Linear(16, 4))
        self.calls = 0
        self.level = 1.0
        self.norms = []

    def forward(self, x):
        self.calls += 1
        norm = float(self.net[0].weight.detach().norm())
        self.level = 0.9 * self.level + 0.1 * norm
        self.norms.append(norm)
        x = self.net(x) * self.level
        self.calls += 1  # after the sums over all rows
        return x * (1 + 0.1 * self.calls + 0.01 * len(self.norms))


model = Kept()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report([*losses, model.calls, model.level, len(model.norms), *model.norms], model)
