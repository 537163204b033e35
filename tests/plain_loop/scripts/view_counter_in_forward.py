# expect: divided
# The forward counts its calls and anneals a factor.
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Annealed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()
        self.step = 0

    def forward(self, x):
        self.step += 1
        return self.net(x) * min(1.0, self.step / 4)


model = Annealed()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report([*losses, model.step], model)
