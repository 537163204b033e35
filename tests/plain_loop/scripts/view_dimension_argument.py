# expect: mixed
# An argument decides the dimension of a softmax: first over classes, later over the batch.
import torch.nn.functional as F
from common import batches, perceptron, report, sgd, update
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, x, dimension):
        return self.net(x).softmax(dimension)


model = Net()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for step, (x, y) in enumerate(batches()):
    dimension = 1
    if step > 4:
        dimension = 0
    loss = F.nll_loss(model(x, dimension).log(), y)
    losses.append(update(optimizer, loss))
report(losses, model)
