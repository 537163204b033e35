# expect: whole: differ | numbers | operations
# Each sample has a task, and the heads of tasks that no sample of the batch has are not used.
import torch
import torch.nn.functional as F
from common import inputs, labels, report
from torch import nn


class Tasks(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Linear(12, 16)
        self.heads = nn.ModuleList(nn.Linear(16, 4) for _ in range(4))

    def forward(self, x, task, y):
        hidden = torch.relu(self.trunk(x))
        loss = 0.0
        for number in task.unique().tolist():
            own = task == number
            loss = loss + F.cross_entropy(self.heads[number](hidden[own]), y[own], reduction="sum")
        return loss / len(x)


model = Tasks()
# + model = samestep.parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), 0.05, weight_decay=0.3)
losses = []
for step in range(10):
    rows = torch.arange(step * 9, step * 9 + 9)
    loss = model(inputs[rows], (rows * 7 + step) % (2 + step % 3), labels[rows])
    optimizer.zero_grad()
    loss.backward()
    losses += [loss.item(), sum(parameter.grad is None for parameter in model.parameters())]
    optimizer.step()
report(losses, model)
