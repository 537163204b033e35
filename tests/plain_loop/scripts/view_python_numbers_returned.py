# expect: whole: turns values of rows into Python numbers
# The model returns its loss with numbers taken out of tensors, and one of them scales the loss.
import torch.nn.functional as F
from common import batches, perceptron, report, sgd
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, x, y):
        out = self.net(x)
        correct = out.argmax(1) == y
        numbers = {"accuracy": correct.double().mean().item(), "spread": float(out.softmax(1).std())}
        return F.cross_entropy(out, y), numbers


model = Net()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for x, y in batches():
    loss, numbers = model(x, y)
    optimizer.zero_grad()
    (loss * (1 + numbers["spread"])).backward()
    optimizer.step()
    losses += [loss.item(), numbers["accuracy"], numbers["spread"]]
report(losses, model)
