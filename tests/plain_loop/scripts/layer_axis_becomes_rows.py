# expect: mixed
# A normalization over values becomes one over the rows of the batch, by a number in a closure.
import torch.nn.functional as F
from common import batches, perceptron, report, sgd, update
from torch import nn


def make_normalization(axis):
    def normalize(x):
        return x - x.mean(axis, keepdim=True)

    return normalize


class Normalized(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()
        self.normalize = make_normalization(1)

    def forward(self, x):
        return self.normalize(self.net(x))


model = Normalized()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for step, (x, y) in enumerate(batches(16)):
    if step == 6:
        model.normalize = make_normalization(0)
    loss = F.cross_entropy(model(x), y)
    losses.append(update(optimizer, loss))
report(losses, model)
