# expect: error: E_RANK_BATCH
# Rank 0 changes one of its batches.
import os

import torch.nn.functional as F
from common import batches, perceptron, report, sgd

is_first_of_several = os.environ.get("RANK") == "0" and int(os.environ["WORLD_SIZE"]) > 1

model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for step, (x, y) in enumerate(batches()):
    if is_first_of_several and step == 4:
        x = x * 1.01
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
