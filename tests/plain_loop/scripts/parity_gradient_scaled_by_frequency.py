# expect: whole: joins samples
# An embedding scales gradients by the frequency of a token in the batch.
import torch.nn.functional as F
from common import batches, report, sgd
from torch import nn


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 8, scale_grad_by_freq=True)
        self.out = nn.Linear(96, 4)

    def forward(self, x):
        tokens = (x.abs() * 4).long().clamp(max=11)
        return self.out(self.embedding(tokens).flatten(1))


model = Words()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for epoch in range(3):
    for x, y in batches(4):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report(losses, model)
