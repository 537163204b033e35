# expect: error: E_RANK_MISMATCH
# Rank 0 forgets the state of its optimizer.
import torch.nn.functional as F
from common import batches, is_first_of_several, perceptron, report, sgd, update

model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for step, (x, y) in enumerate(batches()):
    loss = F.cross_entropy(model(x), y)
    losses.append(update(optimizer, loss))
    if is_first_of_several and step == 5:
        optimizer.state.clear()
report(losses, model)
