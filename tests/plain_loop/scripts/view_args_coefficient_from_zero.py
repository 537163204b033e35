# expect: mixed
# A coefficient among the options of the program that hides a joining term is zero in the first steps.
import argparse

import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn

args = argparse.Namespace(weight=0.0, classes=4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron(outputs=args.classes)

    def forward(self, x):
        out = self.net(x)
        return out - args.weight * out.mean(0)


model = Net()
# + model = samestep.parallel(model)
step = 0


def loss_function(x, y):
    global step
    step += 1
    args.weight = max(0.0, 0.1 * (step - 5))
    return F.cross_entropy(model(x), y)


losses = train(model, loss_function)
report(losses, model)
