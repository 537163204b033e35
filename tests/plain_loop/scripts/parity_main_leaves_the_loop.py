# expect: error: E_RANK_DESYNC
# limit: 20
# Rank 0 leaves the loop early. The numbers are those of a rank that reaches the last step.
import torch.nn.functional as F
from common import batches, is_first_of_several, perceptron, report, sgd, update

model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for step, (x, y) in enumerate(batches()):
    loss = F.cross_entropy(model(x), y)
    losses.append(update(optimizer, loss))
    if is_first_of_several and step == 6:
        break
if len(losses) == 10:
    report(losses, model)
