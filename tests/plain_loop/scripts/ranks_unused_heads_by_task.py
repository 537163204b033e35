# expect: divided
# Each batch is of one task, and two batches make a step: heads without a gradient keep momentum and weights.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report
from torch import nn


class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron(12, 8)
        self.heads = nn.ModuleDict({name: nn.Linear(8, 4) for name in ("a", "b", "c")})

    def forward(self, x, task):
        return self.heads[task](self.net(x))


model = Tasks()
# + model = samestep.parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), 0.05, weight_decay=0.3)
losses = []
for step, (x, y) in enumerate(batches(16)):
    loss = F.cross_entropy(model(x, "abbc"[step // 2 % 4]), y) / 2
    loss.backward()
    losses.append(loss.item())
    if step % 2:
        losses.append(sum(parameter.grad is None for parameter in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
report(losses, model)
