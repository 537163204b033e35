# expect: whole: changes the global variable STEP
# A helper function advances a global counter.
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn

STEP = 0


def scale():
    global STEP
    STEP += 1
    return 1 / (1 + 0.02 * STEP)


class Annealed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, x):
        out = self.net(x)
        if self.training:
            out = out * scale()
        return out


model = Annealed()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses, model)
