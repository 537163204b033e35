# expect: whole: fails in the trial
# A graph network: rows are nodes, an argument holds the edges.
import torch
import torch.nn.functional as F
from common import ROWS, report, train
from torch import nn


class GraphNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(12, 16)
        self.second = nn.Linear(16, 4)

    def forward(self, x, edges):
        hidden = torch.tanh(self.first(x))
        messages = torch.zeros_like(hidden).index_add(0, edges[1], hidden[edges[0]])
        return self.second(hidden + messages)


model = GraphNet()
# + model = samestep.parallel(model)
edges = torch.randint(0, ROWS, (2, 30))
losses = train(model, lambda x, y: F.cross_entropy(model(x, edges), y))
report(losses, model)
