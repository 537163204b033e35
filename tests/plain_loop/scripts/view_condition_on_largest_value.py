# expect: whole: joins
# Inputs are scaled by a condition on the whole batch as a tensor.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report, sgd, update
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, x):
        return self.net(torch.where(x.abs().max() > 10, x / 255, x))


model = Net()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for step, (x, y) in enumerate(batches(12)):
    if step > 5:
        x = x.clone()
        x[0] *= 50
    loss = F.cross_entropy(model(x), y)
    losses.append(update(optimizer, loss))
report(losses, model)
