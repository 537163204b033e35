# expect: whole: joins samples
# Masked logits are minus infinity, and the others depend on the other samples.
import torch
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, x):
        out = self.net(x)
        out = out - 0.1 * out.mean(0)
        return out.masked_fill(torch.tensor([False, False, False, True]), float("-inf"))


model = Masked()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y.clamp(max=2)))
report(losses, model)
