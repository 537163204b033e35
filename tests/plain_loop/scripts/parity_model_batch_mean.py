# expect: whole: joins samples
# A layer subtracts the mean of the batch.
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Centred(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, x):
        out = self.net(x)
        return out - out.mean(0)


model = Centred()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses, model)
