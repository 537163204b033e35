# expect: divided
# Curriculum dropout: the rate of torch's layer begins at zero.
import torch
import torch.nn.functional as F
from common import batches, report, sgd
from torch import nn

model = nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.0), nn.Tanh(), nn.Linear(16, 4))
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for step, (x, y) in enumerate(batches(25)):
    model[1].p = 0.0 if step < 5 else 0.02 * step
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report([*losses, torch.rand(())], model)
