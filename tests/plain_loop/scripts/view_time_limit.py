# expect: divided
# limit: 20
# allows: E_RANK_DESYNC E_PEER_LOST
# The loop ends by time.
import time

import torch.nn.functional as F
from common import batches, perceptron, report, sgd, update

model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
start = time.time()
losses = []
while time.time() - start < 0.7 or len(losses) < 6:
    x, y = batches(1)[0]
    loss = F.cross_entropy(model(x), y)
    losses.append(update(optimizer, loss))
report(losses[:6])
