# expect: divided
# Gumbel softmax, noise of rows, noise shared by the batch, masks of rows, Bernoulli samples, and dropped rows.
import torch
from common import report, update
from torch import nn
from torch.nn import functional as F


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.choose, self.codes, self.head = nn.Linear(6, 5), nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = x + 0.1 * torch.randn_like(x) + 0.1 * torch.randn(6)
        code = F.gumbel_softmax(self.choose(x), tau=0.7, hard=True)
        hidden = self.codes(code) * torch.empty(len(x), 8).bernoulli_(0.8)
        hidden = hidden.masked_fill(torch.rand(len(x), 1) < 0.1, 0.0)
        hidden = hidden * hidden.new_empty(len(x), 1).bernoulli_(0.9).div_(0.9)
        return self.head(hidden + torch.empty_like(hidden).uniform_(-0.1, 0.1))


model = Noisy()
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
losses = []
for _ in range(10):
    loss = F.cross_entropy(model(torch.randn(11, 6)), torch.randint(0, 3, (11,)))
    losses.append(update(optimizer, loss))
report([*losses, torch.rand(())], model)
