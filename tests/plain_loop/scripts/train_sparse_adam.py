# expect: whole
# Word vectors with sparse gradients: SparseAdam for the table, SGD for the rest.
import torch
from common import report
from torch import nn
from torch.nn import functional as F


class SkipGram(nn.Module):
    def __init__(self):
        super().__init__()
        self.word = nn.Embedding(20, 6, sparse=True)
        self.head = nn.Linear(6, 20)

    def forward(self, word):
        return self.head(self.word(word))


model = SkipGram()
# + model = samestep.parallel(model)
sparse = torch.optim.SparseAdam(model.word.parameters(), lr=0.05)
dense = torch.optim.SGD(model.head.parameters(), lr=0.5)
losses = []
for _ in range(8):
    loss = F.cross_entropy(model(torch.randint(0, 20, (11,))), torch.randint(0, 20, (11,)))
    sparse.zero_grad()
    dense.zero_grad()
    loss.backward()
    sparse.step()
    dense.step()
    losses.append(loss.item())
report(losses, model)
