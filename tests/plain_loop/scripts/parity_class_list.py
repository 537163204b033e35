# expect: whole: changes the variable seen of the class Centring
# The forward moves a number in a list of the class.
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Centring(nn.Module):
    seen = [0.0]

    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, x):
        if self.training:
            Centring.seen[0] = 0.9 * Centring.seen[0] + 0.1 * float(x.mean())
        return self.net(x - Centring.seen[0])


model = Centring()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses, model)
