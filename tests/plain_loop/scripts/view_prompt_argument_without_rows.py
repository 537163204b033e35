# expect: divided
# Learned prompts are arguments that have no rows.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report
from torch import nn


class Prompted(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron(24)

    def forward(self, x, prompt, more):
        own = (prompt + more.mean(0)).expand_as(x)
        return self.net(torch.cat([x, own], 1))


model = Prompted()
# + model = samestep.parallel(model)
prompt = nn.Parameter(torch.randn(12) * 0.1)
more = nn.Parameter(torch.randn(3, 12) * 0.1)
optimizer = torch.optim.SGD([*model.parameters(), prompt, more], 0.2)
losses = []
for x, y in batches():
    loss = F.cross_entropy(model(x, prompt, more), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses += [loss.item(), prompt.grad.norm(), more.grad.norm()]
report(losses, model)
