# expect: error: E_RANK_BATCH
# Rank 0 changes one of its batches.
import torch.nn.functional as F
from common import batches, is_first_of_several, perceptron, report, sgd, update

model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for step, (x, y) in enumerate(batches()):
    if is_first_of_several and step == 4:
        x = x * 1.01
    loss = F.cross_entropy(model(x), y)
    losses.append(update(optimizer, loss))
report(losses, model)
