# expect: error: E_RANK_SETTINGS E_RANK_MISMATCH E_RANK_DESYNC E_RANK_BATCH
# Rank 0 changes a buffer that no forward writes.
import torch
import torch.nn.functional as F
from common import batches, is_first_of_several, perceptron, report, sgd, update
from torch import nn


class Tempered(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()
        self.register_buffer("temperature", torch.ones(()))

    def forward(self, x):
        return self.net(x) / self.temperature


model = Tempered()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for step, (x, y) in enumerate(batches()):
    loss = F.cross_entropy(model(x), y)
    losses.append(update(optimizer, loss))
    if is_first_of_several:
        model.temperature.fill_(1 + 0.1 * step)
report(losses, model)
