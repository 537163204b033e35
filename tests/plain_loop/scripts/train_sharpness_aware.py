# expect: divided
# SAM: the gradient at the worst point near the weights, two backwards per step.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report, sgd

model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for x, y in batches():
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    with torch.no_grad():
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        moved = [(p, 0.05 * p.grad / norm) for p in model.parameters()]
        for p, shift in moved:
            p.add_(shift)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for p, shift in moved:
            p.sub_(shift)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
report(losses, model)
