# expect: divided
# The model returns a dataclass with its loss next to logits, and a distribution.
from dataclasses import dataclass

import torch
from common import report
from torch import nn
from torch.nn import functional as F


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor
    policy: torch.distributions.Categorical


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(6, 3)

    def forward(self, x, y):
        logits = self.net(x)
        return Output(F.cross_entropy(logits, y), logits, torch.distributions.Categorical(logits=logits))


model = Net()
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(10):
    out = model(torch.randn(11, 6), torch.randint(0, 3, (11,)))
    loss = out.loss - 0.1 * out.policy.entropy().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses += [loss.item(), out.logits.max().item()]
report(losses, model)
