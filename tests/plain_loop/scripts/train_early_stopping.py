# expect: divided
# The loop keeps the best weights on validation data and stops when they get no better.
import copy

import torch
import torch.nn.functional as F
from common import batches, perceptron, report, sgd

training, validation = batches()[:7], batches()[7:]
model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model, lr=0.05)
best, best_weights, patience, losses = float("inf"), None, 0, []
for _ in range(30):
    model.train()
    for x, y in training:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        value = sum(F.cross_entropy(model(x), y, reduction="sum").item() for x, y in validation)
    losses.append(value)
    if value < best - 1e-3:
        best, best_weights, patience = value, copy.deepcopy(model.state_dict()), 0
    else:
        patience += 1
    if patience == 2:
        break
model.load_state_dict(best_weights)
report(losses, model)
