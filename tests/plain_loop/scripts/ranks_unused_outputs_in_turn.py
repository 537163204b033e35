# expect: divided
# A model returns the outputs of two heads, and the loss of a step uses one of them, or neither's last layer.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report
from torch import nn


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron(12, 8)
        self.classes = nn.Linear(8, 4)
        self.value = nn.Sequential(nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x):
        hidden = self.net(x)
        return {"classes": self.classes(hidden), "value": self.value(hidden), "hidden": hidden}


model = Both()
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.2)
losses = []
for step, (x, y) in enumerate(batches(12)):
    out = model(x)
    if step % 3 == 0:
        loss = F.cross_entropy(out["classes"], y)
    elif step % 3 == 1:
        loss = (out["value"][:, 0] - y).square().mean()
    else:
        loss = out["hidden"].square().mean() + 0 * F.cross_entropy(out["classes"].detach(), y)
    optimizer.zero_grad()
    loss.backward()
    losses += [loss.item(), sum(parameter.grad is None for parameter in model.parameters())]
    optimizer.step()
report(losses, model)
