# expect: whole: writes
# Fake quantization with a moving range of the activations, as in quantization-aware training.
import torch
from common import report, update
from torch import nn


class FakeQuantize(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("low", torch.tensor(-1.0))
        self.register_buffer("high", torch.tensor(1.0))

    def forward(self, x):
        if self.training:
            self.low = 0.9 * self.low + 0.1 * x.detach().min()
            self.high = 0.9 * self.high + 0.1 * x.detach().max()
        scale = (self.high - self.low) / 15
        rounded = torch.round(x / scale) * scale
        return x + (rounded - x).detach()


model = nn.Sequential(nn.Linear(6, 8), FakeQuantize(), nn.ReLU(), nn.Linear(8, 3), FakeQuantize())
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(8):
    loss = nn.functional.cross_entropy(model(torch.randn(11, 6)), torch.randint(0, 3, (11,)))
    losses.append(update(optimizer, loss))
report(losses, model)
