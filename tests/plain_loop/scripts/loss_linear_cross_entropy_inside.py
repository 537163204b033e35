# expect: divided
# Cross entropy with its linear layer inside the model (torch 2.13), with ignored and weighted targets.
import torch
import torch.nn.functional as F
from common import inputs, labels, report, update
from torch import nn


class Joined(nn.Module):
    def __init__(self, **options):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(12, 8), nn.Tanh())
        self.head = nn.Linear(8, 4, bias=False)
        self.options = options

    def forward(self, x, y):
        function = getattr(F, "linear_cross_entropy", linear_cross_entropy)
        return function(self.body(x), self.head.weight, y, **self.options)


def linear_cross_entropy(x, weight, y, **options):
    return F.cross_entropy(F.linear(x, weight), y, **options)


for options in ({}, {"ignore_index": 2}, {"reduction": "sum"}, {"label_smoothing": 0.1}):
    model = Joined(**options)
    # + model = samestep.parallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(6):
        own = slice(11 * step, 11 * step + 11)
        loss = model(inputs[own], labels[own])
        losses.append(update(optimizer, loss))
    report(losses, model)
