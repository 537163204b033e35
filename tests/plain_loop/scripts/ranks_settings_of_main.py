# expect: error: E_RANK_SETTINGS
# Rank 0 changes a number in an object of the model, which its forward reads.
from types import SimpleNamespace

import torch.nn.functional as F
from common import batches, is_first_of_several, perceptron, report, sgd, update
from torch import nn


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()
        self.options = {"inner": SimpleNamespace(temperature=1.0)}

    def forward(self, x):
        return self.net(x) / self.options["inner"].temperature


model = Tempered()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for step, (x, y) in enumerate(batches()):
    loss = F.cross_entropy(model(x), y)
    losses.append(update(optimizer, loss))
    if is_first_of_several and step == 5:
        model.options["inner"].temperature = 1.1
report(losses, model)
