# expect: divided
# Self-attention that is called with one tensor as query, key and value.
import torch
from common import report, sgd, update
from torch import nn

model = nn.MultiheadAttention(8, 2, batch_first=True)
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for _ in range(8):
    x = torch.randn(11, 5, 8)
    out, weights = model(x, x, x)
    loss = (out - x).square().mean()
    losses.append(update(optimizer, loss))
report(losses, model)
