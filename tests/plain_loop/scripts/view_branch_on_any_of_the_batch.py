# expect: mixed: its operations depend on the rows | operations that differ between rows
# A branch on `.any()` of the batch, as in models for half precision.
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Clamping(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron(12, 12)
        self.out = nn.Linear(12, 4)

    def forward(self, x):
        if (x.abs() > 2.75).any():
            x = x.clamp(-1, 1)
        return self.out(self.net(x))


model = Clamping()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses, model)
