# expect: divided
# Saliency, integrated gradients and a generator through a frozen judge: gradients of inputs only.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report, sgd, update

judge = perceptron().requires_grad_(False)
generator = perceptron(12, 12)
# + judge = samestep.parallel(judge)
optimizer = sgd(generator)
results = []
for x, y in batches():
    loss = F.cross_entropy(judge(generator(x)), y)
    update(optimizer, loss)
    total = torch.zeros_like(x)
    for part in (0.25, 0.5, 1.0):
        inner = (part * x).requires_grad_()
        (slope,) = torch.autograd.grad(judge(inner)[:, 0].sum(), inner)
        total += slope * x
    results += [loss.item(), total.abs().mean().item()]
report(results, generator)
