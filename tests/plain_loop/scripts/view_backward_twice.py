# expect: divided
# Two backwards of one call, a gradient of one weight between them, and a second call in the same step.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report, sgd

model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for x, y in batches():
    out = model(x)
    first = F.cross_entropy(out, y)
    second = out.square().mean() + (model(x * 0.5) * out.detach()).mean()
    optimizer.zero_grad()
    (gradient,) = torch.autograd.grad(first, model[2].weight, retain_graph=True)
    first.backward(retain_graph=True)
    (second * gradient.norm()).backward()
    optimizer.step()
    losses += [first.item(), second.item(), gradient.norm()]
report(losses, model)
