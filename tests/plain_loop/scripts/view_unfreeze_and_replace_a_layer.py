# expect: mixed: joins samples
# Between steps the script unfreezes a layer, and replaces another by one that joins samples.
import torch.nn.functional as F
from common import batches, perceptron, report, sgd, update
from torch import nn


class Centre(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


model = perceptron()
# + model = samestep.parallel(model)
model[0].requires_grad_(False)
optimizer = sgd(model)
losses = []
for step, (x, y) in enumerate(batches()):
    if step == 3:
        model[0].requires_grad_(True)
    if step == 7:
        model[1] = Centre()
    loss = F.cross_entropy(model(x), y)
    losses.append(update(optimizer, loss))
report(losses, model)
