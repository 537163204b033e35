# expect: divided
# Cross entropy with class weights.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report, sgd

weight = torch.tensor([0.2, 1.0, 5.0, 2.0])
model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for epoch in range(3):
    for x, y in batches(4):
        loss = F.cross_entropy(model(x), y, weight=weight)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report(losses, model)
