# expect: mixed
# A global coefficient that hides a term which joins samples is zero in the first steps.
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn

WEIGHT = 0.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, x):
        out = self.net(x)
        return out - WEIGHT * out.mean(0)


model = Net()
# + model = samestep.parallel(model)
step = 0


def loss_function(x, y):
    global step, WEIGHT
    step += 1
    WEIGHT = max(0.0, 0.1 * (step - 5))
    return F.cross_entropy(model(x), y)


losses = train(model, loss_function)
report(losses, model)
