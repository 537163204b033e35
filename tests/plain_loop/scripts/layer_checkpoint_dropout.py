# expect: divided
# Parts with dropout are computed again in the backward, reentrant and not.
import torch.nn.functional as F
from common import report, train
from torch import nn
from torch.utils.checkpoint import checkpoint


class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2)) for _ in range(4))
        self.last = nn.Linear(16, 4)

    def forward(self, x):
        x = F.dropout(self.first(x), 0.1, self.training)
        for number, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=number % 2 == 0)
        return self.last(x)


model = Blocks()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses, model)
