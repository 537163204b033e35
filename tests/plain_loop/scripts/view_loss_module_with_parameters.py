# expect: divided
# The loss is a module with parameters of its own, outside of the model.
import torch
import torch.nn.functional as F
from common import perceptron, report, sgd, train
from torch import nn


class CentreLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.centres = nn.Parameter(torch.randn(4, 4))

    def forward(self, features, y):
        return (features - self.centres[y]).square().sum(1).mean()


model = perceptron()
centre_loss = CentreLoss()
# + model = samestep.parallel(model)


def loss_function(x, y):
    out = model(x)
    return F.cross_entropy(out, y) + 0.1 * centre_loss(out, y)


losses = train(model, loss_function, sgd(model, centre_loss, lr=0.05))
report(losses, model, centre_loss)
