# expect: whole: joins samples
# A parameter that begins at zero hides a term that joins samples.
import torch
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()
        self.gamma = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        out = self.net(x)
        return out + self.gamma * (out - out.mean(0)).square()


model = Gated()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses, model)
