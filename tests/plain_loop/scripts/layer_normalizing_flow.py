# expect: divided
# Coupling layers with logarithms of determinants; samples by the inverse of the flow.
import torch
from common import perceptron, report, train
from torch import nn


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList(perceptron(6, 12) for _ in range(3))
        self.register_buffer("order", torch.randperm(12))

    def forward(self, x, inverse=False):
        total = x.new_zeros(len(x))
        for part in reversed(self.parts) if inverse else self.parts:
            if inverse:
                x = x[:, self.order.argsort()]
            first, second = x.chunk(2, 1)
            scale, shift = part(first).chunk(2, 1)
            scale = scale.tanh()
            if inverse:
                x = torch.cat([first, (second - shift) * (-scale).exp()], 1)
            else:
                x = torch.cat([first, second * scale.exp() + shift], 1)[:, self.order]
            total = total + scale.sum(1)
        return x, total


model = Flow()
# + model = samestep.parallel(model)


def loss_function(x, y):
    z, total = model(x)
    return (0.5 * z.square().sum(1) - total).mean()


losses = train(model, loss_function, torch.optim.Adam(model.parameters(), lr=0.01))
with torch.no_grad():
    samples, _ = model(torch.randn(20, 12), inverse=True)
report([*losses, *samples[:, 0]], model)
