# expect: error: E_RANK_SETTINGS E_RANK_MISMATCH E_RANK_DESYNC E_RANK_BATCH
# Rank 0 changes its copy of the data.
import os

import torch.nn.functional as F
from common import batches, inputs, perceptron, report, sgd

is_first_of_several = os.environ.get("RANK") == "0" and int(os.environ["WORLD_SIZE"]) > 1

model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for step, (x, y) in enumerate(batches()):
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
    if is_first_of_several:
        inputs.mul_(1.01)
report(losses, model)
