# expect: divided
# Dice of the whole batch.
import torch.nn.functional as F
from common import batches, perceptron, report, sgd


def dice(out, y):
    p = out.softmax(1)
    t = F.one_hot(y, 4)
    return 1 - ((2 * (p * t).sum(0) + 1) / (p.sum(0) + t.sum(0) + 1)).mean()


model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for epoch in range(3):
    for x, y in batches(4):
        loss = dice(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report(losses, model)
