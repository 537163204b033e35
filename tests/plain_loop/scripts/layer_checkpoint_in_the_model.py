# expect: divided
# Activation checkpointing of blocks with dropout and batch norm, of both kinds.
import torch
from common import report, sgd, update
from torch import nn
from torch.utils.checkpoint import checkpoint


class Net(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2)) for _ in range(2)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


for reentrant in (False, True):
    model = Net(reentrant)
    # + model = samestep.parallel(model)
    optimizer = sgd(model, lr=0.1)
    losses = []
    for _ in range(8):
        loss = nn.functional.cross_entropy(model(torch.randn(11, 6)), torch.randint(0, 3, (11,)))
        losses.append(update(optimizer, loss))
    report([*losses, torch.rand(())], model)
