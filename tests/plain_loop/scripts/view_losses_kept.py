# expect: divided
# The script keeps the losses as tensors, with their graphs.
import torch.nn.functional as F
from common import batches, perceptron, report, sgd, update

model = perceptron(hidden=400)
# + model = samestep.parallel(model)
optimizer = sgd(model, lr=0.01)
losses = []
for x, y in batches():
    loss = F.cross_entropy(model(x), y)
    update(optimizer, loss)
    losses.append(loss)
report([loss.item() for loss in losses], model)
