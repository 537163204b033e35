# expect: whole: its operations depend on the rows
# Lengths come as a Python list; in the first batch all are equal.
import torch
import torch.nn.functional as F
from common import perceptron, report, train
from torch import nn


class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, x, lengths):
        rows = []
        for row, length in zip(x, lengths):
            rows.append(torch.cat([row[:length], row.new_zeros(12 - length)]))
        return self.net(torch.stack(rows))


model = Padded()
# + model = samestep.parallel(model)
step = 0


def loss_function(x, y):
    global step
    step += 1
    lengths = [12] * len(x)
    if step > 1:
        lengths = [3 + (row * 5 + step) % 9 for row in range(len(x))]
    return F.cross_entropy(model(x, lengths), y)


losses = train(model, loss_function)
report(losses, model)
