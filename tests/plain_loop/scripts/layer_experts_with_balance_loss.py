# expect: whole: joins samples
# Mixture of experts, top 1, with the balance loss of the batch returned with the output.
import torch
from common import report, update
from torch import nn
from torch.nn import functional as F


class Experts(nn.Module):
    def __init__(self, count=3):
        super().__init__()
        self.router = nn.Linear(6, count)
        self.experts = nn.ModuleList(nn.Linear(6, 4) for _ in range(count))

    def forward(self, x):
        p = self.router(x).softmax(1)
        weight, chosen = p.max(1)
        out = sum((chosen == i)[:, None] * expert(x) for i, expert in enumerate(self.experts))
        share = F.one_hot(chosen, len(self.experts)).double().mean(0)
        return weight[:, None] * out, len(self.experts) * (share * p.mean(0)).sum()


model = Experts()
# + model = samestep.parallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
losses = []
for _ in range(8):
    out, balance = model(torch.randn(11, 6))
    loss = F.cross_entropy(out, torch.randint(0, 4, (11,))) + 0.01 * balance
    losses.append(update(optimizer, loss))
report(losses, model)
