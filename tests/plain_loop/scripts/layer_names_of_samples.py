# expect: mixed: has arguments or modes of more than
# The model is given the names of its samples, which are new in each batch: four strings, then eleven.
import torch.nn.functional as F
from common import batches, perceptron, report, sgd, update
from torch import nn


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, x, names):
        assert all(isinstance(name, str) for name in names)
        return self.net(x)


losses = []
for rows in (4, 11):
    model = Named()
    # + model = samestep.parallel(model)
    optimizer = sgd(model)
    for step, (x, y) in enumerate(batches(80 if rows == 4 else 10, rows)):
        loss = F.cross_entropy(model(x, [f"sample {step * rows + row}" for row in range(rows)]), y)
        losses.append(update(optimizer, loss))
report(losses, model)
