# expect: divided
# Random numbers of three kinds in a forward: one mask for the batch, one number that decides, one per row.
import torch
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, x):
        x = x * (torch.rand(1, 12) > 0.2) + 0.1 * torch.randn(4).repeat(3)
        if torch.rand(1).item() < 0.3:
            x = x * 0.5
        return self.net(x + 0.1 * torch.randn(x.shape[0], 1))


model = Noisy()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses, model)
