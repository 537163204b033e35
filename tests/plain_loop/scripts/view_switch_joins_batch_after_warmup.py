# expect: mixed: joins samples
# After some steps a switch of the script lets the model join samples.
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Switched(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()
        self.mix = nn.Linear(4, 4)
        self.is_mixing = False

    def forward(self, x):
        out = self.net(x)
        if self.is_mixing:
            return out + self.mix(out - out.mean(0))
        return out


model = Switched()
# + model = samestep.parallel(model)
step = 0


def loss_function(x, y):
    global step
    step += 1
    model.is_mixing = step > 5
    return F.cross_entropy(model(x), y)


losses = train(model, loss_function)
report(losses, model)
