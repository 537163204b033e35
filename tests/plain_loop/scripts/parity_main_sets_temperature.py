# expect: error: E_RANK_SETTINGS
# Rank 0 changes a number of the model.
import os

import torch.nn.functional as F
from common import batches, perceptron, report, sgd
from torch import nn

is_first_of_several = os.environ.get("RANK") == "0" and int(os.environ["WORLD_SIZE"]) > 1


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()
        self.temperature = 1.0

    def forward(self, x):
        return self.net(x) / self.temperature


model = Tempered()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for step, (x, y) in enumerate(batches()):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if is_first_of_several:
        model.temperature = 1 + 0.1 * step
report(losses, model)
