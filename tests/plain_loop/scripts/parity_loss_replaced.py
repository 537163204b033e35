# expect: divided
# The loss changes in the loop: a weight in place, also in a partial function, a subclass, numbers in a dict and a list.
import functools

import torch
import torch.nn.functional as F
from common import batches, perceptron, report, sgd, update
from torch import nn


class SmoothedLoss(nn.CrossEntropyLoss):
    pass


def adapted(out, y):
    first, second = F.cross_entropy(out, y), out.square().mean()
    factors["first"] = 0.9 * factors["first"] + 0.1 * float((second / first).detach())
    return factors["first"] * first + second


def relative(out, y):
    loss = F.cross_entropy(out, y)
    recent.append(float(loss.detach()))
    return loss / (sum(recent[-5:]) / len(recent[-5:]))


factors, recent = {"first": 1.0}, []
weight = torch.ones(4)
weighted, partial = nn.CrossEntropyLoss(weight=weight), functools.partial(F.cross_entropy, weight=weight)
smoothed = SmoothedLoss(label_smoothing=0.3)
model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for epoch in range(3):
    weight.copy_(torch.tensor([1.0, 1.0 + epoch, 1.0 + 2 * epoch, 1.0]))
    smoothed.label_smoothing = 0.3 / (epoch + 1)
    for criterion in (weighted, partial, smoothed, adapted, relative):
        for x, y in batches(2):
            losses.append(update(optimizer, criterion(model(x), y)))
report(losses, model)
