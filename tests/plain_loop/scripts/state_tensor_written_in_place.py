# expect: divided
# A tensor that is no buffer is written in place and needed in the backward; with and without batch norm.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report, sgd, update
from torch import nn


class Counting(nn.Module):
    def __init__(self, net):
        super().__init__()
        self.net = net
        self.state = {"calls": torch.zeros(())}

    def forward(self, x):
        self.state["calls"] += 1
        return self.net(x) * (0.5 * self.state["calls"]) * self.state["calls"]


joined = Counting(nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4)))
alone = Counting(perceptron())
# + joined, alone = samestep.parallel(joined), samestep.parallel(alone)
losses = []
for model in (joined, alone):
    optimizer = sgd(model, lr=0.01)
    for x, y in batches(6):
        loss = F.cross_entropy(model(x), y)
        losses.append(update(optimizer, loss))
    losses.append(model.state["calls"])
report(losses, joined, alone)
