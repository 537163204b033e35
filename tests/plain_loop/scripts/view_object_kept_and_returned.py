# expect: whole: returns an object that is kept elsewhere too
# The model returns an object of the script, which steers the loss and is changed in each step.
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class State:
    def __init__(self):
        self.scale = 1.0


states = {"now": State()}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, x):
        return self.net(x), states["now"]


model = Net()
# + model = samestep.parallel(model)


def loss_function(x, y):
    logits, state = model(x)
    state.scale *= 0.9
    assert states["now"] is state
    return F.cross_entropy(states["now"].scale * logits, y)


losses = train(model, loss_function)
report(losses, model)
