# expect: mixed: writes seen differently for a part of the rows
# Statistics of the test batches are kept in a list, in evaluation.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report, train
from torch import nn


class Adapting(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()
        self.seen = []

    def forward(self, x):
        if not self.training:
            self.seen.append(x.mean(0))
            x = x - torch.stack(self.seen).mean(0)
        return self.net(x)


model = Adapting()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
model.eval()
with torch.no_grad():
    for x, y in batches():
        losses.append(F.cross_entropy(model(x), y).item())
report(losses, model)
