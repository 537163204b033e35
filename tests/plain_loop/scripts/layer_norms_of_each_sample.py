# expect: divided
# Group, instance, layer, local response and RMS norm: they look at one sample only.
import torch
from common import report, update
from torch import nn

model = nn.Sequential(
    nn.Conv2d(2, 8, 3, padding=1),
    nn.GroupNorm(4, 8),
    nn.ReLU(),
    nn.Conv2d(8, 8, 3, padding=1),
    nn.InstanceNorm2d(8, affine=True),
    nn.LocalResponseNorm(3),
    nn.Flatten(),
    nn.LayerNorm(200),
    nn.Linear(200, 6),
    nn.RMSNorm(6),
)
# + model = samestep.parallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []
for _ in range(8):
    loss = nn.functional.cross_entropy(model(torch.randn(9, 2, 5, 5)), torch.randint(0, 6, (9,)))
    losses.append(update(optimizer, loss))
report(losses, model)
