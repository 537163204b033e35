# expect: divided
# Weights of the classes counted in each batch.
import torch
from common import report
from torch import nn
from torch.nn import functional as F

model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(10):
    x = torch.randn(13, 6)
    y = torch.multinomial(torch.tensor([0.6, 0.2, 0.1, 0.1]), 13, replacement=True)
    weight = 13 / (4 * torch.bincount(y, minlength=4).clamp(min=1))
    loss = F.cross_entropy(model(x), y, weight=weight)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
