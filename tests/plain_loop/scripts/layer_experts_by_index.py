# expect: whole: operations
# Mixture of experts that computes each expert on its rows only: an expert without rows is skipped.
import torch
from common import report
from torch import nn


class Experts(nn.Module):
    def __init__(self, count=4):
        super().__init__()
        self.router = nn.Linear(6, count)
        self.experts = nn.ModuleList(nn.Linear(6, 4) for _ in range(count))

    def forward(self, x):
        weight, chosen = self.router(x).softmax(1).max(1)
        out = x.new_zeros(len(x), 4)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero()[:, 0]
            if len(rows) > 0:
                out = out.index_add(0, rows, expert(x[rows]))
        return weight[:, None] * out


model = Experts()
# + model = samestep.parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
losses = []
for _ in range(10):
    loss = nn.functional.cross_entropy(model(torch.randn(9, 6)), torch.randint(0, 4, (9,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
