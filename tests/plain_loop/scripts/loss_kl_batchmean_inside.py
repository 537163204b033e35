# expect: divided
# Distillation inside a module: KL divergence with `batchmean`, and the mean over elements.
import torch
from common import report
from torch import nn
from torch.nn import functional as F


class Student(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))

    def forward(self, x, teacher):
        own = F.log_softmax(self.net(x) / 2.0, dim=1)
        batch_mean = F.kl_div(own, teacher, reduction="batchmean", log_target=True)
        mean = F.kl_div(own, teacher.exp(), reduction="mean")
        return 4.0 * batch_mean, mean


model = Student()
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(8):
    batch_mean, mean = model(torch.randn(11, 6), F.log_softmax(torch.randn(11, 4), dim=1))
    loss = batch_mean + 0.5 * mean
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
