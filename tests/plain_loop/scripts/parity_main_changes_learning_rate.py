# expect: error: E_RANK_SETTINGS
# Rank 0 changes the learning rate.
import torch.nn.functional as F
from common import batches, is_first_of_several, perceptron, report, sgd, update

model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for step, (x, y) in enumerate(batches()):
    loss = F.cross_entropy(model(x), y)
    losses.append(update(optimizer, loss))
    if is_first_of_several:
        optimizer.param_groups[0]["lr"] = 0.1
report(losses, model)
