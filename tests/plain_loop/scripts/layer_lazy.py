# expect: divided
# Lazy layers get their shapes in the first call.
import torch
from common import report, update
from torch import nn

model = nn.Sequential(nn.LazyConv2d(4, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))
# + model = samestep.parallel(model)
model(torch.zeros(5, 1, 6, 6))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(8):
    loss = nn.functional.cross_entropy(model(torch.randn(9, 1, 6, 6)), torch.randint(0, 3, (9,)))
    losses.append(update(optimizer, loss))
report([*losses, torch.rand(())], model)
