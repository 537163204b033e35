# expect: mixed: does not follow the rows
# The number of rows that come out depends on the data.
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Selecting(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()
        self.is_late = False

    def forward(self, x):
        limit = -0.5 if self.is_late else -9.0
        selected = x[:, 0] > limit
        return self.net(x[selected]), selected


model = Selecting()
# + model = samestep.parallel(model)
step = 0


def loss_function(x, y):
    global step
    step += 1
    model.is_late = step > 2
    out, selected = model(x)
    return F.cross_entropy(out, y[selected])


losses = train(model, loss_function)
report(losses, model)
