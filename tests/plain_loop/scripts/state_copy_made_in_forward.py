# expect: divided
# A moving average of the encoder that the first forward makes by `copy.deepcopy`.
import copy

import torch
import torch.nn.functional as F
from common import report, train
from torch import nn


class Bootstrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Sequential(nn.Linear(16, 16), nn.Tanh()))
        self.head = nn.Linear(16, 4)
        self.target = None

    @torch.no_grad()
    def average(self):
        for mean, value in zip(self.target.parameters(), self.online.parameters(), strict=True):
            mean.mul_(0.9).add_(value, alpha=0.1)

    def forward(self, x):
        if self.target is None:
            self.target = copy.deepcopy(self.online).requires_grad_(False)
        features = self.online(x)
        return self.head(features), (features - self.target(x)).square().mean(1)


def loss_of(x, y):
    logits, distances = model(x)
    model.average()
    return F.cross_entropy(logits, y) + distances.mean()


model = Bootstrapped()
# + model = samestep.parallel(model)
losses = train(model, loss_of)
report(losses, model)
