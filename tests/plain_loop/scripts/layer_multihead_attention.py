# expect: divided
# Cross attention with dropout and returned weights; the keys are a trained table without rows.
import torch
from common import report, update
from torch import nn


class Pooling(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.queries = nn.Parameter(torch.randn(3, 8))

    def forward(self, x, padding):
        queries = self.queries.expand(len(x), -1, -1)
        return self.attend(queries, x, x, key_padding_mask=padding, need_weights=True)


model = Pooling()
# + model = samestep.parallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
losses = []
for _ in range(8):
    padding = torch.zeros(10, 6, dtype=torch.bool)
    padding[torch.arange(10) % 3 == 0, 4:] = True
    pooled, weights = model(torch.randn(10, 6, 8), padding)
    loss = (pooled - 1).pow(2).mean() + 0.1 * weights.pow(2).sum()
    losses.append(update(optimizer, loss))
report(losses, model)
