# expect: whole: writes running
# Instance norm with running statistics: a buffer that averages over the samples of the batch.
import torch
from common import report, update
from torch import nn

model = nn.Sequential(
    nn.Conv2d(1, 4, 3), nn.InstanceNorm2d(4, track_running_stats=True), nn.Flatten(), nn.Linear(36, 2)
)
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(6):
    loss = model(torch.randn(9, 1, 5, 5)).pow(2).mean()
    losses.append(update(optimizer, loss))
model.eval()
losses.append(model(torch.randn(9, 1, 5, 5)).sum().item())
report(losses, model)
