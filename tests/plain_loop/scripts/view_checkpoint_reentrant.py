# expect: divided
# Reentrant activation checkpointing of a part with batch norm and dropout.
import torch.nn.functional as F
from common import report, train
from torch import nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.part = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.3))
        self.out = nn.Linear(16, 4)

    def forward(self, x):
        return self.out(checkpoint(self.part, self.first(x), use_reentrant=True))


model = Net()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses, model)
