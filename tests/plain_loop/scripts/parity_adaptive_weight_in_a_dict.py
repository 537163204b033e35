# expect: divided
# The loop keeps an adaptive weight of a term in a dict.
import torch.nn.functional as F
from common import batches, perceptron, report, sgd

weights = {"first": 1.0}
model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for epoch in range(3):
    for x, y in batches(4):
        out = model(x)
        first = F.cross_entropy(out, y)
        second = out.square().mean()
        weights["first"] = 0.9 * weights["first"] + 0.1 * float((second / first).detach())
        loss = weights["first"] * first + second
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report(losses, model)
