# expect: divided
# Weight norm and an orthogonal weight as parametrizations: weights are computed from parameters in each forward.
import torch
from common import report
from torch import nn
from torch.nn.utils import parametrizations

model = nn.Sequential(
    parametrizations.weight_norm(nn.Conv1d(2, 4, 3)),
    nn.ReLU(),
    nn.Flatten(),
    parametrizations.orthogonal(nn.Linear(24, 4)),
)
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(8):
    loss = nn.functional.cross_entropy(model(torch.randn(9, 2, 8)), torch.randint(0, 4, (9,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
