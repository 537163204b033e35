# expect: mixed
# A coefficient in a dictionary of settings that hides a joining term is zero in the first steps.
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Net(nn.Module):
    def __init__(self, settings):
        super().__init__()
        self.settings = settings
        self.net = perceptron()

    def forward(self, x):
        out = self.net(x)
        return out - self.settings["loss"]["weight"] * out.mean(0)


model = Net({"loss": {"weight": 0.0}, "hidden": 16})
# + model = samestep.parallel(model)
step = 0


def loss_function(x, y):
    global step
    step += 1
    model.settings["loss"]["weight"] = max(0.0, 0.1 * (step - 5))
    return F.cross_entropy(model(x), y)


losses = train(model, loss_function)
report(losses, model)
