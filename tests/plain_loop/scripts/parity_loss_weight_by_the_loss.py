# expect: divided
# The loop sets the weight of the loss from recent losses.
import torch.nn.functional as F
from common import batches, perceptron, report, sgd

weight = 1.0
model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for epoch in range(3):
    for x, y in batches(4):
        loss = weight * F.cross_entropy(model(x), y)
        weight = 0.9 * weight + 0.1 * float(loss.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report(losses, model)
