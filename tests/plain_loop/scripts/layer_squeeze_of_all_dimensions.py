# expect: mixed
# `squeeze()` without a dimension: with one row it would remove the batch, too.
import torch
from common import report, update
from torch import nn


class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, x):
        return self.net(x).squeeze()


data = torch.randn(27, 6)
model = Scorer()
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses = []
for _ in range(4):
    for x in data.split(12):  # the last batch has 3 rows
        loss = nn.functional.mse_loss(model(x), x.sum(1))
        losses.append(update(optimizer, loss))
report(losses, model)
