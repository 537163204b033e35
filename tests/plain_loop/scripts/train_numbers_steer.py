# expect: divided
# Python numbers steer the run: a plateau schedule, a threshold that stops, and hard batches that are repeated.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report, sgd, update

model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model, lr=0.4)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
losses = []
for _ in range(10):
    total = 0.0
    for x, y in batches(4):
        for _ in range(3):
            loss = F.cross_entropy(model(x), y)
            update(optimizer, loss)
            total += loss.item()
            if loss.item() < 1.0:
                break
    scheduler.step(total)
    losses += [total, optimizer.param_groups[0]["lr"]]
    if total < 1.0:
        break
report(losses, model)
