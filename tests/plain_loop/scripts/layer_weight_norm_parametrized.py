# expect: divided
# Weights that parametrizations compute in each forward: weight norm, an orthogonal weight, and spectral norm, whose
# power iteration writes a buffer.
import torch
from common import report, sgd, update
from torch import nn
from torch.nn.utils import parametrizations

model = nn.Sequential(
    parametrizations.weight_norm(nn.Conv1d(2, 4, 3)),
    nn.ReLU(),
    nn.Flatten(),
    parametrizations.orthogonal(nn.Linear(24, 12)),
    parametrizations.spectral_norm(nn.Linear(12, 4)),
)
# + model = samestep.parallel(model)
optimizer = sgd(model, lr=0.1)
losses = []
for _ in range(8):
    loss = nn.functional.cross_entropy(model(torch.randn(9, 2, 8)), torch.randint(0, 4, (9,)))
    losses.append(update(optimizer, loss))
report(losses, model)
