# expect: divided
# Heteroscedastic regression: the model predicts mean and variance and returns its loss with them.
import torch
from common import report
from torch import nn
from torch.nn import functional as F


class Heteroscedastic(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 16), nn.SiLU())
        self.mean = nn.Linear(16, 1)
        self.variance = nn.Linear(16, 1)

    def forward(self, x, y):
        hidden = self.body(x)
        mean = self.mean(hidden)
        variance = F.softplus(self.variance(hidden)) + 0.01
        return {"loss": F.gaussian_nll_loss(mean, y, variance, full=True), "mean": mean, "variance": variance}


model = Heteroscedastic()
# + model = samestep.parallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []
for _ in range(8):
    x = torch.randn(11, 3)
    y = x.sum(1, keepdim=True) + 0.2 * torch.randn(11, 1)
    out = model(x, y)
    optimizer.zero_grad()
    out["loss"].backward()
    optimizer.step()
    losses += [out["loss"].item(), out["mean"].sum().item(), out["variance"].max().item()]
report(losses, model)
