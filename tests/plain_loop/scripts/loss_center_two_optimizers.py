# expect: divided
# Center loss: a second module with parameters of its own, a second optimizer, and scaled gradients.
import torch
from common import report
from torch import nn
from torch.nn import functional as F


class CenterLoss(nn.Module):
    def __init__(self, classes, features):
        super().__init__()
        self.centers = nn.Parameter(torch.randn(classes, features))

    def forward(self, z, y):
        return (z - self.centers[y]).pow(2).sum(1).clamp(1e-12, 1e12).mean()


model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
center = CenterLoss(3, 3)
# + model = samestep.parallel(model)
# + center = samestep.parallel(center)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
center_optimizer = torch.optim.SGD(center.parameters(), lr=0.5)
losses = []
for _ in range(10):
    x, y = torch.randn(11, 8), torch.randint(0, 3, (11,))
    z = model(x)
    loss = F.cross_entropy(z, y) + 0.3 * center(z, y)
    optimizer.zero_grad()
    center_optimizer.zero_grad()
    loss.backward()
    for p in center.parameters():
        p.grad.mul_(1 / 0.3)
    optimizer.step()
    center_optimizer.step()
    losses.append(loss.item())
report(losses, model, center)
