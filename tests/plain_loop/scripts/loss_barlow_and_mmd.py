# expect: divided
# Statistics of the batch in the loop: cross correlation of two views and the distance of two distributions.
import torch
from common import report
from torch import nn

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5))
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)


def kernel(a, b):
    return torch.exp(-torch.cdist(a, b).pow(2) / 8).mean()


losses = []
for _ in range(8):
    x = torch.randn(12, 6)
    first, second = model(x + 0.1 * torch.randn_like(x)), model(x + 0.1 * torch.randn_like(x))
    first_normal = (first - first.mean(0)) / first.std(0)
    second_normal = (second - second.mean(0)) / second.std(0)
    correlation = first_normal.T @ second_normal / 12
    barlow = (correlation - torch.eye(5)).pow(2).sum()
    target = torch.randn(12, 5)
    mmd = kernel(first, first) - 2 * kernel(first, target) + kernel(target, target)
    loss = barlow + mmd
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
