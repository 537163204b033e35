# expect: divided
# The weights of a loss are changed in place: deferred re-weighting.
import torch
from common import batches, perceptron, report, sgd
from torch import nn

criterion = nn.CrossEntropyLoss(weight=torch.ones(4))
model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for epoch in range(3):
    if epoch == 1:
        criterion.weight.copy_(torch.tensor([0.1, 1.0, 4.0, 9.0]))
    for x, y in batches(4):
        loss = criterion(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report(losses, model)
