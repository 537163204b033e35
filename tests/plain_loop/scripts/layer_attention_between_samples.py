# expect: whole: joins samples
# SAINT and StyleGAN: attention between the samples of the batch and the deviation of the batch as a feature.
import torch
from common import report, update
from torch import nn


class Samples(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.attend = nn.Linear(6, 8), nn.MultiheadAttention(8, 2)
        self.head = nn.Linear(9, 2)

    def forward(self, x):
        hidden = self.embed(x)
        hidden = hidden + self.attend(hidden, hidden, hidden, need_weights=False)[0]
        deviation = hidden.std(0).mean().expand(len(x), 1)
        return self.head(torch.cat([hidden, deviation], dim=1))


model = Samples()
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(8):
    loss = nn.functional.cross_entropy(model(torch.randn(9, 6)), torch.randint(0, 2, (9,)))
    losses.append(update(optimizer, loss))
report(losses, model)
