# expect: divided
# Dropout of elements and channels.
import torch
from common import report, update
from torch import nn

model = nn.Sequential(
    nn.Conv2d(1, 6, 3, padding=1),
    nn.Dropout2d(0.3),
    nn.Flatten(2),
    nn.Conv1d(6, 6, 3),
    nn.Dropout1d(0.2),
    nn.Flatten(),
    nn.Linear(138, 8),
    nn.SELU(),
    nn.Linear(8, 3),
    nn.Dropout(0.1),
)
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses = []
for _ in range(8):
    loss = nn.functional.cross_entropy(model(torch.randn(11, 1, 5, 5)), torch.randint(0, 3, (11,)))
    losses.append(update(optimizer, loss))
report([*losses, torch.rand(())], model)
