# expect: divided
# Focal loss as a module inside a detector head: a mean over rows that is written by hand.
import torch
from common import report
from torch import nn
from torch.nn import functional as F


class FocalHead(nn.Module):
    def __init__(self, alpha=0.25, gamma=2.0):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 4))
        self.alpha, self.gamma = alpha, gamma

    def forward(self, x, y):
        cross_entropy = F.binary_cross_entropy_with_logits(self.net(x), y, reduction="none")
        p = torch.exp(-cross_entropy)
        return (self.alpha * (1 - p) ** self.gamma * cross_entropy).mean()


model = FocalHead()
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
losses = []
for _ in range(8):
    x = torch.randn(11, 6)
    loss = model(x, (x[:, :4] > 1).double())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
