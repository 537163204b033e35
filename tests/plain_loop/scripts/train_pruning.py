# expect: whole: keeps a tensor with a graph in Linear
# Pruned weights, which a hook computes before each call; more of them after some steps.
import torch.nn.functional as F
from common import batches, perceptron, report, sgd, update
from torch.nn.utils import prune

model = perceptron()
prune.l1_unstructured(model[0], "weight", amount=0.3)
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for step, (x, y) in enumerate(batches()):
    if step == 5:
        prune.l1_unstructured(model[0], "weight", amount=0.5)
    loss = F.cross_entropy(model(x), y)
    losses.append(update(optimizer, loss))
prune.remove(model[0], "weight")
report(losses, model)
