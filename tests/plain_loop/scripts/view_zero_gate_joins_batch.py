# expect: mixed: joins samples
# A factor of zero hides a term that joins samples in the first steps.
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()
        self.mix = nn.Linear(4, 4, bias=False)
        self.gamma = 0.0

    def forward(self, x):
        out = self.net(x)
        return out + self.gamma * self.mix(out - out.mean(0))


model = Gated()
# + model = samestep.parallel(model)
step = 0


def loss_function(x, y):
    global step
    step += 1
    model.gamma = max(0.0, 0.2 * (step - 5))
    return F.cross_entropy(model(x), y)


losses = train(model, loss_function)
report(losses, model)
