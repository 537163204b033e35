# expect: divided
# Four prototypes are an argument, and the last batch has four rows too.
import torch.nn.functional as F
from common import batches, inputs, perceptron, report, sgd, update
from torch import nn


class Prototypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron(12, 8)

    def forward(self, x, prototypes):
        return self.net(x) @ self.net(prototypes).T


model = Prototypes()
# + model = samestep.parallel(model)
optimizer = sgd(model, lr=0.05)
prototypes = inputs[:4].clone()
losses = []
for step, (x, y) in enumerate(batches(8)):
    if step == 7:
        x = x[:4]
        y = y[:4]
    loss = F.cross_entropy(model(x, prototypes), y)
    losses.append(update(optimizer, loss))
report(losses, model)
