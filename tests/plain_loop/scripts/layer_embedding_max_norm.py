# expect: whole
# Embedding with `max_norm`: the forward rescales the rows of the weight that the batch uses.
import torch
from common import report, update
from torch import nn

model = nn.Sequential(nn.Embedding(12, 6, max_norm=1.0), nn.Flatten(), nn.Linear(18, 2))
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
losses = []
for _ in range(8):
    loss = nn.functional.cross_entropy(model(torch.randint(0, 12, (9, 3))), torch.randint(0, 2, (9,)))
    losses.append(update(optimizer, loss))
report(losses, model)
