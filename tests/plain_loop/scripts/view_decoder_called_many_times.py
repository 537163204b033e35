# expect: divided
# A cell and a head are called 20 times in each step.
import torch
from common import report, sgd, train
from torch import nn

cell = nn.GRUCell(12, 32)
head = nn.Linear(32, 12)
# + cell = samestep.parallel(cell)
# + head = samestep.parallel(head)


def loss_function(x, y):
    hidden = torch.zeros(len(x), 32)
    loss = 0
    for _ in range(20):
        hidden = cell(x, hidden)
        loss = loss + (head(hidden) - x).square().mean() / 20
    return loss


losses = train(cell, loss_function, sgd(cell, head, lr=0.05), count=4)
report(losses, cell, head)
