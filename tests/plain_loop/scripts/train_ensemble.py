# expect: divided
# Three models train on the mean of their predictions; a fourth one is a list of heads in a module.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report, sgd
from torch import nn


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.members = nn.ModuleList(perceptron(hidden=4 + 2 * i) for i in range(3))

    def forward(self, x):
        return [member(x) for member in self.members]


single = [perceptron() for _ in range(3)]
heads = Heads()
# + single = [samestep.parallel(model) for model in single]
# + heads = samestep.parallel(heads)
optimizer = sgd(*single, heads)
losses = []
for x, y in batches():
    outputs = [model(x) for model in single] + heads(x)
    mean = torch.stack(outputs).mean(0)
    spread = torch.stack(outputs).var(0).mean()
    loss = F.cross_entropy(mean, y) - 0.01 * spread
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, *single, heads)
