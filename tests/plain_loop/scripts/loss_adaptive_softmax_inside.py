# expect: whole: operations
# Adaptive softmax: which clusters are computed depends on the labels of the batch, so its operations depend on rows.
import torch
from common import report, update
from torch import nn


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 16)
        self.head = nn.AdaptiveLogSoftmaxWithLoss(16, 30, cutoffs=[5, 15], div_value=2.0)

    def forward(self, word, following):
        return self.head(self.embed(word), following).loss


model = Words()
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
losses = []
for _ in range(10):
    loss = model(torch.randint(0, 30, (12,)), torch.randint(0, 30, (12,)))
    losses.append(update(optimizer, loss))
report(losses, model)
