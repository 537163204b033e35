# expect: divided
# Outputs in a named tuple, a dict of a module dict, a list, and None.
from typing import NamedTuple

import torch
from common import report, update
from torch import nn
from torch.nn import functional as F


class Output(NamedTuple):
    heads: dict
    features: list
    loss: torch.Tensor | None = None
    name: str = "two heads"


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.heads = nn.ModuleDict({"size": nn.Linear(8, 1), "kind": nn.Linear(8, 3)})

    def forward(self, x, kind=None):
        hidden = torch.relu(self.body(x))
        heads = {name: head(hidden) for name, head in self.heads.items()}
        loss = None
        if kind is not None:
            loss = F.cross_entropy(heads["kind"], kind)
        return Output(heads, [hidden, hidden.norm(dim=1)], loss)


model = Heads()
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range(12):
    x, kind = torch.randn(11, 6), torch.randint(0, 3, (11,))
    if step % 2 == 0:
        out = model(x, kind)
        loss = out.loss + out.heads["size"].pow(2).mean()
    else:
        out = model(x)
        assert out.loss is None
        loss = F.cross_entropy(out.heads["kind"], kind) + 0.1 * out.features[1].mean()
    losses.append(update(optimizer, loss))
report(losses, model)
