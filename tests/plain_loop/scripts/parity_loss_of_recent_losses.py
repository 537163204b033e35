# expect: divided
# The loss is divided by the mean of recent losses in a list.
import torch.nn.functional as F
from common import batches, perceptron, report, sgd

recent = []
model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for epoch in range(3):
    for x, y in batches(4):
        loss = F.cross_entropy(model(x), y)
        recent.append(float(loss.detach()))
        loss = loss / (sum(recent[-5:]) / len(recent[-5:]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report(losses, model)
