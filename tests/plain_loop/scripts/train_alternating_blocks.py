# expect: divided
# Progressive growing: the forward has more blocks from epoch to epoch, by an attribute that the loop sets.
import torch
import torch.nn.functional as F
from common import batches, report, update
from torch import nn


class Growing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(12, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.depth = 1

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for block in self.blocks[: self.depth]:
            x = x + torch.tanh(block(x))
        return self.head(x)


model = Growing()
# + model = samestep.parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
losses = []
for depth in (1, 2, 3):
    model.depth = depth
    for x, y in batches(6):
        loss = F.cross_entropy(model(x), y)
        losses.append(update(optimizer, loss))
report(losses, model)
