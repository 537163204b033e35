# expect: divided
# Tied autoencoder: one weight in two layers and transposed, one block applied three times.
import torch
from common import report, update
from torch import nn
from torch.nn import functional as F


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.block = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU())

    def forward(self, x):
        hidden = self.first(x)
        for _ in range(3):
            hidden = hidden + self.block(hidden)
        return F.linear(self.second(hidden), self.first.weight.T)


model = Tied()
# + model = samestep.parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
losses = []
for _ in range(8):
    x = torch.randn(11, 8)
    loss = F.mse_loss(model(x), x) + 1e-3 * model.first.weight.abs().sum()
    losses.append(update(optimizer, loss))
report(losses, model)
