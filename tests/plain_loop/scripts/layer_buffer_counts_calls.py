# expect: divided
# A buffer counts calls and anneals the temperature of a gate; it does not depend on the rows.
import torch
from common import report, update
from torch import nn


class Annealed(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.value = nn.Linear(6, 8), nn.Linear(6, 8)
        self.head = nn.Linear(8, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        if self.training:
            self.calls += 1
        gate = torch.sigmoid(self.gate(x) * (1 + 0.1 * self.calls))
        return self.head(gate * self.value(x))


model = Annealed()
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
losses = []
for _ in range(10):
    loss = nn.functional.cross_entropy(model(torch.randn(11, 6)), torch.randint(0, 2, (11,)))
    losses.append(update(optimizer, loss))
report(losses, model)
