# expect: divided
# Word vectors: negative samples are drawn inside the model, by numbers of rows and from a distribution.
import torch
import torch.nn.functional as F
from common import report, sgd, update
from torch import nn


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.centers = nn.Embedding(30, 6)
        self.contexts = nn.Embedding(30, 6)

    def forward(self, center, context):
        others = torch.randint(0, 30, (len(center), 5))
        vector = self.centers(center)
        right = F.logsigmoid((vector * self.contexts(context)).sum(1))
        wrong = F.logsigmoid(-(self.contexts(others) @ vector[:, :, None]).squeeze(2)).sum(1)
        return -(right + wrong)


model = Words()
# + model = samestep.parallel(model)
optimizer = sgd(model, lr=0.5)
losses = []
for _ in range(10):
    center = torch.randint(0, 30, (11,))
    loss = model(center, (center + 1) % 30).mean()
    losses.append(update(optimizer, loss))
report(losses, model)
