# expect: whole: uses a parameter that is not its own
# Layers in a Python list are no submodules; the script gives their parameters to the optimizer.
import torch
import torch.nn.functional as F
from common import report, sgd, train
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.blocks = [nn.Linear(12, 12) for _ in range(2)]
        self.out = nn.Linear(12, 4)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.out(x)


model = Net()
# + model = samestep.parallel(model)
hidden = nn.ModuleList(model.blocks)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y), sgd(model, hidden))
report(losses, model, hidden)
