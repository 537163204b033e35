# expect: divided
# The same without batch norm, and the short last batch of the epoch.
import torch
import torch.nn.functional as F
from common import images, report
from torch import nn
from torch.utils.data import DataLoader

model = nn.Sequential(nn.Conv2d(1, 6, 3), nn.Tanh(), nn.Flatten(), nn.Dropout(0.1), nn.Linear(384, 5))
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
losses = []
for epoch in range(2):
    for x, y in DataLoader(images(115), 24, shuffle=True):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report(losses, model)
