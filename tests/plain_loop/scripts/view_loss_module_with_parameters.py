# expect: divided
# The loss is a module outside of the model, with parameters and, from the fifth step on, a moving buffer.
import torch
import torch.nn.functional as F
from common import perceptron, report, sgd, train
from torch import nn


class CentreLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.randn(4, 4))
        self.steps = 0
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, features, y):
        self.steps += 1
        if self.steps > 4:
            self.mean = 0.9 * self.mean + 0.1 * features.detach().mean(0)
        return (features - self.mean - self.centres[y]).square().sum(1).mean()


model = perceptron()
centre_loss = CentreLoss()
# + model = samestep.parallel(model)


def loss_function(x, y):
    out = model(x)
    return F.cross_entropy(out, y) + 0.1 * centre_loss(out, y)


losses = train(model, loss_function, sgd(model, centre_loss, lr=0.05))
report(losses, model, centre_loss)
