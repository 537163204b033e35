# expect: divided
# The model returns a dataclass with its loss and its logits.
import dataclasses

import torch
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, x, y):
        logits = self.net(x)
        return Output(F.cross_entropy(logits, y), logits)


model = Net()
# + model = samestep.parallel(model)


def loss_function(x, y):
    output = model(x, y)
    return output.loss + 0.1 * output.logits.square().mean()


losses = train(model, loss_function)
report(losses, model)
