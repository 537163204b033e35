# expect: mixed
# Batch norm in a conv net over an epoch with a last batch of one sample.
import torch
from common import report
from torch import nn
from torch.nn import functional as F

images, labels = torch.randn(23, 1, 6, 6), torch.randint(0, 3, (23,))
model = nn.Sequential(
    nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3)
)
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
losses = []
for _ in range(4):
    for x, y in zip(images.split(11), labels.split(11), strict=True):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
model.eval()
with torch.no_grad():
    losses.append(F.cross_entropy(model(images), labels).item())
report(losses, model)
