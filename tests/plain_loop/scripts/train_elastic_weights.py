# expect: divided
# Continual learning: squared gradients of single rows are weights of a penalty on the parameters.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report, sgd, update

model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model, lr=0.05)
losses = []
penalty = [torch.zeros_like(p) for p in model.parameters()]
anchors = [p.detach().clone() for p in model.parameters()]
for task in range(2):
    for x, y in batches(5):
        loss = F.cross_entropy(model(x), (y + task) % 4)
        distances = [(w * (p - a).square()).sum() for w, p, a in zip(penalty, model.parameters(), anchors, strict=True)]
        loss = loss + sum(distances)
        losses.append(update(optimizer, loss))
    out = F.log_softmax(model(x), 1)
    for row in range(4):
        slopes = torch.autograd.grad(out[row, y[row]], list(model.parameters()), retain_graph=True)
        penalty = [w + slope.square() for w, slope in zip(penalty, slopes, strict=True)]
    anchors = [p.detach().clone() for p in model.parameters()]
report(losses, model)
