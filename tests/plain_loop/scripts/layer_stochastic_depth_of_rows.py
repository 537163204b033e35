# expect: divided
# DropPath as in timm: each row keeps or loses a branch, drawn with `bernoulli_` on a new tensor.
import torch
from common import report
from torch import nn


class DropPath(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x):
        if not self.training:
            return x
        keep = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(1 - self.p)
        return x * keep.div_(1 - self.p)


class Block(nn.Module):
    def __init__(self, p):
        super().__init__()
        self.norm, self.layers, self.drop = nn.LayerNorm(8), nn.Linear(8, 8), DropPath(p)
        self.scale = nn.Parameter(torch.full((8,), 1e-2))

    def forward(self, x):
        return x + self.drop(self.scale * self.layers(self.norm(x)).relu())


model = nn.Sequential(Block(0.1), Block(0.3), nn.Linear(8, 3))
# + model = samestep.parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
losses = []
for _ in range(10):
    loss = nn.functional.cross_entropy(model(torch.randn(11, 8)), torch.randint(0, 3, (11,)))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
