# expect: whole: changes the attribute bank of Bank
# A memory bank in a deque.
import collections

import torch
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Bank(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()
        self.bank = collections.deque(maxlen=16)

    def forward(self, x):
        out = self.net(x)
        if self.bank:
            out = out - 0.1 * torch.stack(list(self.bank)).mean(0)
        if self.training:
            self.bank.extend(out.detach())
        return out


model = Bank()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses, model)
