# expect: divided
# Activation checkpointing of two linear layers.
import torch.nn.functional as F
from common import report, train
from torch import nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.part = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
        self.out = nn.Linear(16, 4)

    def forward(self, x):
        return self.out(checkpoint(self.part, self.first(x), use_reentrant=False))


model = Net()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses, model)
