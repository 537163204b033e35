# expect: divided
# Transfer learning: the head is replaced in the middle of the run by one for other classes.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report, sgd, update
from torch import nn

model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for step, (x, y) in enumerate(batches(14)):
    if step == 7:
        model[2] = nn.Linear(16, 2)
        optimizer = torch.optim.SGD(
            [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[2].parameters()}], lr=0.2
        )
    loss = F.cross_entropy(model(x), y if step < 7 else y % 2)
    losses.append(update(optimizer, loss))
report(losses, model)
