# expect: whole: joins samples
# Embedding with gradients scaled by how often an index is in the batch.
import torch
from common import report, update
from torch import nn

model = nn.Sequential(nn.Embedding(8, 6, padding_idx=0, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(18, 2))
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
losses = []
for _ in range(8):
    loss = nn.functional.cross_entropy(model(torch.randint(0, 8, (9, 3))), torch.randint(0, 2, (9,)))
    losses.append(update(optimizer, loss))
report(losses, model)
