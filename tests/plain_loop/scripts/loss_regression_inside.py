# expect: divided
# Regression losses inside the model, mean and sum, and rows of losses.
import torch
from common import report
from torch import nn


class Regression(nn.Module):
    def __init__(self, criterion):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))
        self.criterion = criterion

    def forward(self, x, y):
        return self.criterion(self.layers(x), y)


criteria = [
    nn.MSELoss(),
    nn.MSELoss(reduction="sum"),
    nn.MSELoss(reduction="none"),
    nn.L1Loss(),
    nn.SmoothL1Loss(),
    nn.HuberLoss(reduction="sum"),
    nn.PoissonNLLLoss(),
]
for criterion in criteria:
    model = Regression(criterion)
    # + model = samestep.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    losses = []
    for _ in range(5):
        x = torch.randn(11, 6)
        loss = model(x, x[:, :4].abs()).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    report(losses, model)
