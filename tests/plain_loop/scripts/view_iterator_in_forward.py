# expect: whole: uses the global variable noise, which cannot be compared
# Each forward takes the next item of an iterator of the script.
import torch
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn

noise = iter([torch.full((12,), index / 10) for index in range(100)])


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, x):
        return self.net(x + next(noise))


model = Noisy()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses, model)
