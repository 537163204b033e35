# expect: divided
# A subclass of a loss changes in the loop.
from common import batches, perceptron, report, sgd
from torch import nn


class SmoothedLoss(nn.CrossEntropyLoss):
    pass


criterion = SmoothedLoss(label_smoothing=0.3)
model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for epoch in range(3):
    criterion.label_smoothing = 0.3 / (epoch + 1)
    for x, y in batches(4):
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report(losses, model)
