# expect: divided
# Re-identification: the hardest positive and negative of each anchor are mined in the batch.
import torch
from common import report
from torch import nn
from torch.nn import functional as F

model = nn.Sequential(nn.Linear(8, 16), nn.PReLU(), nn.Linear(16, 4))
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
losses = []
for _ in range(10):
    y = torch.arange(12) % 4
    z = model(torch.randn(12, 8) + y[:, None])
    distance = torch.cdist(z, z)
    same = y[:, None] == y
    hardest_positive = (distance * same).max(1).values
    hardest_negative = distance.masked_fill(same, float("inf")).min(1).values
    loss = F.relu(hardest_positive - hardest_negative + 0.5).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
