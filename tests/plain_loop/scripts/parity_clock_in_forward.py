# expect: error: E_RANK_DESYNC E_RANK_SETTINGS E_RANK_MISMATCH E_RANK_BATCH
# numbers: vary
# The forward reads the clock.
import time

import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Clocked(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, x):
        return self.net(x) * (1 + 0.001 * (time.time_ns() % 97))


model = Clocked()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses, model)
