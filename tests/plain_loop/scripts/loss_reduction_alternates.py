# expect: divided
# The reduction of a loss inside the model, in a closure, changes back and forth.
import torch.nn.functional as F
from common import batches, perceptron, report, sgd, update
from torch import nn


class Model(nn.Module):
    def __init__(self, criterion):
        super().__init__()
        self.net = perceptron()
        self.criterion = criterion

    def forward(self, x, y):
        return self.criterion(self.net(x), y)


def make_model():
    state = {"reduction": "mean"}
    return Model(lambda out, y: F.l1_loss(out, F.one_hot(y, 4).double(), reduction=state["reduction"])), state


model, state = make_model()
# + model = samestep.parallel(model)
optimizer = sgd(model, lr=0.01)
losses = []
for step, (x, y) in enumerate(batches(24)):
    state["reduction"] = "sum" if 4 <= step < 8 or step in (12, 13, 15, 18) else "mean"
    loss = model(x, y)
    losses.append(update(optimizer, loss))
report(losses, model)
