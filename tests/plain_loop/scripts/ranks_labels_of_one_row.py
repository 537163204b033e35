# expect: error: E_RANK_MISMATCH
# Rank 0 has another label for one of 1,100 rows.
import torch
import torch.nn.functional as F
from common import batches, is_first_of_several, perceptron, report, sgd

model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for step, (x, y) in enumerate(batches()):
    x, y = torch.cat([x] * 100), torch.cat([y] * 100)
    if is_first_of_several and step == 5:
        y[3] = (y[3] + 1) % 4
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    losses.append(loss.item())
    optimizer.step()
report(losses[:5], model)
