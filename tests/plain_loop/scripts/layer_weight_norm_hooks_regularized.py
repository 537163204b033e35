# expect: whole
# The older weight norm leaves its weight, with a graph, in an attribute, and the loop regularizes that weight.
import warnings

import torch
from common import report, update
from torch import nn

warnings.simplefilter("ignore", FutureWarning)
first, second = nn.utils.weight_norm(nn.Linear(6, 12)), nn.utils.spectral_norm(nn.Linear(12, 2))
model = nn.Sequential(first, nn.Tanh(), second)
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for _ in range(8):
    logits = model(torch.randn(11, 6))
    loss = nn.functional.cross_entropy(logits, torch.randint(0, 2, (11,)))
    loss = loss + 0.1 * first.weight.pow(2).sum() + 0.1 * second.weight.abs().sum()
    losses.append(update(optimizer, loss))
report(losses, model)
