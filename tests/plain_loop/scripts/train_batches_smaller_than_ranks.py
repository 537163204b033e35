# expect: mixed
# Batches of one to twelve rows, some with fewer rows than processes.
# processes: 1,3,4
import torch
import torch.nn.functional as F
from common import batches, perceptron, report, sgd, update

model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for rows in (11, 11, 11, 2, 1, 11, 2, 1, 12):
    x, y = batches(1, rows)[0]
    loss = F.cross_entropy(model(x), y)
    losses.append(update(optimizer, loss))
    with torch.inference_mode():
        losses.append(model(x[:1]).sum().item())
report(losses, model)
