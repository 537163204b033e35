# expect: whole: changes a container among its arguments
# The forward writes into the dict of the batch, which the loss reads.
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, batch):
        batch["x"] = batch["x"] * 0.5
        return self.net(batch["x"])


model = Net()
# + model = samestep.parallel(model)


def loss_function(x, y):
    batch = {"x": x, "y": y}
    out = model(batch)
    return F.cross_entropy(out, batch["y"]) + (out.mean(1) - batch["x"].mean(1)).square().mean()


losses = train(model, loss_function)
report(losses, model)
