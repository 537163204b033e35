# expect: whole: changes the attribute noise of Noisy
# A helper object has a generator.
import torch
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Noise:
    def __init__(self):
        self.generator = torch.Generator().manual_seed(3)

    def __call__(self, x):
        return x + 0.1 * torch.randn(x.shape, generator=self.generator)


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()
        self.noise = Noise()

    def forward(self, x):
        if self.training:
            x = self.noise(x)
        return self.net(x)


model = Noisy()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses, model)
