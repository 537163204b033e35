# expect: whole: returns tensors that share memory
# The model returns its input, its output, and a view of the output, which the loss changes in place.
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, x):
        out = self.net(x)
        return x, out, out[:, :2]


model = Net()
# + model = samestep.parallel(model)


def loss_function(x, y):
    same, out, view = model(x)
    out.mul_(2.0)
    return F.cross_entropy(out, y) + view.square().mean() + float(same is x)


losses = train(model, loss_function)
report(losses, model)
