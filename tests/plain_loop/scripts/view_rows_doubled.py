# expect: divided
# The model returns two rows per row.
import torch
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Doubled(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, x):
        both = torch.stack([x, -x], 1).flatten(0, 1)
        return self.net(both)


model = Doubled()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y.repeat_interleave(2)))
report(losses, model)
