# expect: divided
# Each epoch has another loss.
import torch
from common import batches, perceptron, report, sgd
from torch import nn

criteria = [
    nn.CrossEntropyLoss(),
    nn.CrossEntropyLoss(weight=torch.tensor([0.1, 1.0, 4.0, 9.0])),
    nn.CrossEntropyLoss(label_smoothing=0.1),
]
model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for epoch in range(3):
    for x, y in batches(4):
        loss = criteria[epoch](model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report(losses, model)
