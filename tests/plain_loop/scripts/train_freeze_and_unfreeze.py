# expect: divided
# The body is frozen, then trained, then the head is frozen; gradients of frozen parts are None.
import torch
import torch.nn.functional as F
from common import batches, report
from torch import nn

body = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU())
model = nn.Sequential(body, nn.Linear(16, 4))
# + model = samestep.parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
losses = []
for step, (x, y) in enumerate(batches(18)):
    if step in (0, 6, 12):
        body.requires_grad_(step > 0)
        model[1].requires_grad_(step < 12)
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    assert (body[0].weight.grad is None) == (step < 6)
    assert (model[1].weight.grad is None) == (step >= 12)
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
