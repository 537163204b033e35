# expect: whole: joins
# A tensor without rows among the arguments that hides a joining term is zero in the first steps.
import torch
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, x, weight):
        out = self.net(x)
        return out - weight * out.mean(0)


model = Net()
# + model = samestep.parallel(model)
step = 0


def loss_function(x, y):
    global step
    step += 1
    return F.cross_entropy(model(x, torch.tensor(max(0.0, 0.1 * (step - 5)))), y)


losses = train(model, loss_function)
report(losses, model)
