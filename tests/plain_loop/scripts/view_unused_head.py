# expect: divided
# A head that a step does not use has no gradient, so AdamW must not decay it.
import torch
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron(12, 8)
        self.heads = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])

    def forward(self, x, head):
        return self.heads[head](self.net(x))


model = TwoHeads()
# + model = samestep.parallel(model)
step = 0


def loss_function(x, y):
    global step
    step += 1
    return F.cross_entropy(model(x, bool(step > 5)), y)


losses = train(model, loss_function, torch.optim.AdamW(model.parameters(), 0.05, weight_decay=0.3))
report(losses, model)
