# expect: divided
# The weight of a functools.partial is changed in place.
import functools

import torch
import torch.nn.functional as F
from common import batches, perceptron, report, sgd

weight = torch.ones(4)
criterion = functools.partial(F.cross_entropy, weight=weight)
model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for epoch in range(3):
    weight.copy_(torch.tensor([1.0, 1.0 + epoch, 1.0 + 2 * epoch, 1.0]))
    for x, y in batches(4):
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report(losses, model)
