# expect: whole: writes
# The first forward gives an empty buffer its size, as observers of quantization do.
import torch
from common import report, update
from torch import nn


class Range(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("largest", torch.empty(0))

    def forward(self, x):
        largest = x.detach().abs().amax(0)
        if not self.largest.numel():
            self.largest.resize_(largest.shape).zero_()
        self.largest.copy_(torch.maximum(self.largest, largest))
        return x / (1 + self.largest)


model = nn.Sequential(nn.Linear(6, 8), Range(), nn.Tanh(), nn.Linear(8, 3))
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(8):
    loss = nn.functional.cross_entropy(model(torch.randn(11, 6)), torch.randint(0, 3, (11,)))
    losses.append(update(optimizer, loss))
report(losses, model)
