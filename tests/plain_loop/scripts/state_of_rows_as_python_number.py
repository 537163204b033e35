# expect: whole: turns values of rows into Python numbers
# A running mean of the rows, kept as a Python number.
import torch.nn.functional as F
from common import report, train
from torch import nn


class Centring(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4))
        self.mean = 0.0

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * float(x.mean())
        return self.net(x - self.mean)


model = Centring()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report([*losses, model.mean], model)
