# expect: divided
# Two losses of one call, each with its own backward over the same graph.
import torch.nn.functional as F
from common import batches, perceptron, report, sgd

model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for x, y in batches():
    logits = model(x)
    first, second = F.cross_entropy(logits, y), logits.pow(2).topk(2, dim=0).values.mean()
    optimizer.zero_grad()
    first.backward(retain_graph=True)
    norm = sum(p.grad.pow(2).sum() for p in model.parameters())
    (0.1 * second).backward()
    optimizer.step()
    losses += [first.item(), second.item(), norm.item()]
report(losses, model)
