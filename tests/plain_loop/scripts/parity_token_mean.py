# expect: divided
# Labels that are ignored: the mean is over the others.
import torch
import torch.nn.functional as F
from common import batches, labels, perceptron, report, sgd

hidden = torch.rand(44, generator=torch.Generator().manual_seed(3)) < 0.4
targets = labels[:44].masked_fill(hidden, -100)
model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for epoch in range(3):
    for x, y in batches(4):
        loss = F.cross_entropy(model(x), targets[11 * len(losses) % 44 :][:11])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report(losses, model)
