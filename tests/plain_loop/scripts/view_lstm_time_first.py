# expect: whole: joins samples
# Truncated backpropagation through time: the batch is the second dimension, the state is an argument.
import torch
from common import report, sgd
from torch import nn


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 8)
        self.out = nn.Linear(8, 2)

    def forward(self, x, state):
        x, state = self.lstm(x, state)
        return self.out(x), state


model = Recurrent()
# + model = samestep.parallel(model)
optimizer = sgd(model)
state = (torch.zeros(1, 6, 8), torch.zeros(1, 6, 8))
series = torch.randn(80, 6, 4)
losses = []
for start in range(0, 80, 8):
    part = series[start : start + 8]
    state = tuple(tensor.detach() for tensor in state)
    out, state = model(part, state)
    loss = (out - part[:, :, :2].roll(1, 0)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
