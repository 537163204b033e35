# expect: divided
# The norm of the gradients is logged and clipped, and a step without a finite norm is left out.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report
from torch import nn

model = perceptron()
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
losses = []
for number, (x, y) in enumerate(batches()):
    scale = float("inf") if number == 5 else 1.0
    loss = F.cross_entropy(model(x), y) * scale
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.3)
    if torch.isfinite(norm):
        nn.utils.clip_grad_value_(model.parameters(), 0.05)
        optimizer.step()
        losses += [loss.item(), norm.item()]
report(losses, model)
