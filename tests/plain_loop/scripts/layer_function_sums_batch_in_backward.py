# expect: whole: joins samples
# A function with a backward that divides by the norm of the gradient of the whole batch.
import torch
from common import report, update
from torch import nn


class Normalized(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / (gradient.norm() + 1e-8)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.second(Normalized.apply(torch.relu(self.first(x))))


model = Net()
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(8):
    loss = nn.functional.cross_entropy(model(torch.randn(11, 6)), torch.randint(0, 3, (11,)))
    losses.append(update(optimizer, loss))
report(losses, model)
