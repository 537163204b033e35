# expect: whole: has sparse gradients
# An embedding with sparse gradients and SparseAdam.
import torch
import torch.nn.functional as F
from common import batches, report
from torch import nn


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(30, 4, sparse=True)

    def forward(self, tokens):
        return self.embedding(tokens).mean(1)


model = Words()
# + model = samestep.parallel(model)
optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.05)
losses = []
for x, y in batches():
    tokens = (x.abs() * 10).long().clamp(max=29)
    loss = F.cross_entropy(model(tokens), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
