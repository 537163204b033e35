# expect: whole: writes counts differently for a part of the rows
# A buffer counts predicted classes and corrects the logits.
import torch
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()
        self.register_buffer("counts", torch.zeros(4))

    def forward(self, x):
        out = self.net(x)
        self.counts += F.one_hot(out.detach().argmax(1), 4).sum(0)
        return out - 0.5 * self.counts / self.counts.sum()


model = Counting()
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses, model)
