# expect: divided
# The batch grows during the run, and the rate with it.
import torch.nn.functional as F
from common import batches, perceptron, report, sgd

model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model, lr=0.05)
losses = []
for rows in (8, 9, 13, 21, 34):
    for group in optimizer.param_groups:
        group["lr"] = 0.05 * (rows / 8) ** 0.5
    for x, y in batches(3, rows):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report(losses, model)
