# expect: divided
# Inputs as keywords and nested dicts: floats, integers, booleans, numbers, strings, and None.
import torch
from common import report, update
from torch import nn


class Tabular(nn.Module):
    def __init__(self):
        super().__init__()
        self.category, self.numbers = nn.Embedding(7, 4), nn.Linear(5, 4)
        self.flag, self.head = nn.Embedding(2, 4), nn.Linear(4, 2)

    def forward(self, features, *, flags, scale=1.0, mode="sum", extra=None):
        hidden = [self.numbers(features["numbers"]), self.flag(flags.long())]
        hidden += [self.category(column) for column in features["categories"].values()]
        hidden = torch.stack(hidden)
        hidden = hidden.sum(0) if mode == "sum" else hidden.amax(0)
        if extra is not None:
            hidden = hidden + extra
        return self.head(hidden) * scale


model = Tabular()
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
losses = []
for step in range(16):
    categories = {"color": torch.randint(0, 7, (11,)), "shape": torch.randint(0, 7, (11,))}
    logits = model(
        {"numbers": torch.randn(11, 5), "categories": categories},
        flags=torch.rand(11) < 0.5,
        scale=1 + 0.1 * step,
        mode="sum" if step < 8 else "max",
        extra=torch.tensor(0.3) if step % 4 == 3 else None,
    )
    loss = nn.functional.cross_entropy(logits, torch.randint(0, 2, (11,)))
    losses.append(update(optimizer, loss))
report(losses, model)
