# expect: divided
# Several tasks with losses weighted by trained log variances, parameters outside of the call.
import torch
from common import report, update
from torch import nn
from torch.nn import functional as F


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 12)
        self.depth, self.label = nn.Linear(12, 1), nn.Linear(12, 3)

    def forward(self, x):
        hidden = torch.relu(self.body(x))
        return self.depth(hidden), self.label(hidden)


model = TwoHeads()
log_variance = nn.Parameter(torch.zeros(2))
# + model = samestep.parallel(model)
optimizer = torch.optim.Adam([*model.parameters(), log_variance], lr=0.02)
losses = []
for _ in range(10):
    x, y = torch.randn(11, 6), torch.randint(0, 3, (11,))
    depth, label = model(x)
    each = torch.stack([F.l1_loss(depth, x[:, :1]), F.cross_entropy(label, y)])
    loss = (each * torch.exp(-log_variance) + log_variance).sum()
    losses.append(update(optimizer, loss))
report([*losses, *log_variance.flatten()], model)
