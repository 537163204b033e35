# expect: whole: writes
# A buffer follows the mean of the activations of the batch, and the forward uses it.
import torch
from common import report
from torch import nn


class Centered(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 2)
        self.register_buffer("center", torch.zeros(8))

    def forward(self, x):
        hidden = torch.tanh(self.first(x))
        out = self.second(hidden - self.center)
        if self.training:
            self.center.lerp_(hidden.detach().mean(0), 0.1)
        return out


model = Centered()
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
losses = []
for _ in range(10):
    loss = nn.functional.cross_entropy(model(torch.randn(11, 6)), torch.randint(0, 2, (11,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
