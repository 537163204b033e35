# expect: whole
# Text classification with joined tokens and offsets, as in torch's tutorial: the first dimension is not the batch.
import torch
from common import report, update
from torch import nn


class Texts(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.EmbeddingBag(30, 8), nn.Linear(8, 3)

    def forward(self, tokens, offsets):
        return self.head(self.embed(tokens, offsets))


model = Texts()
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
losses = []
for _ in range(8):
    lengths = torch.randint(1, 6, (9,))
    offsets = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)[:-1]])
    logits = model(torch.randint(0, 30, (int(lengths.sum()),)), offsets)
    loss = nn.functional.cross_entropy(logits, torch.randint(0, 3, (9,)))
    losses.append(update(optimizer, loss))
report(losses, model)
