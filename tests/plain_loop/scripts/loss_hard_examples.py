# expect: divided
# Online hard example mining: only the largest third of the losses of the batch counts.
import torch
from common import report
from torch import nn
from torch.nn import functional as F

model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(10):
    x, y = torch.randn(12, 6), torch.randint(0, 3, (12,))
    each = F.cross_entropy(model(x), y, reduction="none")
    loss = each.topk(4).values.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses += [loss.item(), each.median().item(), each.mean().exp().item()]
report(losses, model)
