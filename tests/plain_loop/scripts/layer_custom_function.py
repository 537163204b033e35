# expect: divided
# Functions with a backward of their own: gradient reversal for domain adaptation and a rounded weight.
import torch
from common import report, update
from torch import nn
from torch.nn import functional as F


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.scale * gradient, None


class Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return torch.round(x * 8) / 8

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (x.abs() < 1)


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.label, self.domain = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x, scale):
        hidden = torch.tanh(F.linear(x, Round.apply(self.body.weight), self.body.bias))
        return self.label(hidden), self.domain(Reverse.apply(hidden, scale))


model = Adapted()
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range(10):
    label, domain = model(torch.randn(11, 6), 0.1 * step)
    loss = F.cross_entropy(label, torch.randint(0, 3, (11,))) + F.cross_entropy(domain, torch.arange(11) % 2)
    losses.append(update(optimizer, loss))
report(losses, model)
