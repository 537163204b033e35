# expect: divided
# Losses of numbers and distributions inside the model, mean and sum, and rows of losses.
import torch
from common import report, update
from torch import nn
from torch.nn import functional as F


class Regression(nn.Module):
    def __init__(self, criterion):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))
        self.criterion = criterion

    def forward(self, x, y):
        return self.criterion(self.layers(x), y)


def batch_mean_of_divergences(out, y):
    return F.kl_div(out.log_softmax(1), y.log_softmax(1), reduction="batchmean", log_target=True)


def mean_of_divergences(out, y):
    return F.kl_div(out.log_softmax(1), y.softmax(1), reduction="mean")


def uncertainty(out, y):
    return F.gaussian_nll_loss(out[:, :2], y[:, :2], F.softplus(out[:, 2:]) + 0.01, full=True)


criteria = [
    nn.MSELoss(),
    nn.MSELoss(reduction="sum"),
    nn.MSELoss(reduction="none"),
    nn.L1Loss(),
    nn.SmoothL1Loss(),
    nn.HuberLoss(reduction="sum"),
    nn.PoissonNLLLoss(),
    batch_mean_of_divergences,
    mean_of_divergences,
    uncertainty,
]
for criterion in criteria:
    model = Regression(criterion)
    # + model = samestep.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for _ in range(5):
        x = torch.randn(11, 6)
        loss = model(x, x[:, :4].abs()).mean()
        losses.append(update(optimizer, loss))
    report(losses, model)
