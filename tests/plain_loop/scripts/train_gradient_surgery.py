# expect: divided
# PCGrad: gradients of two tasks by `autograd.grad`, projected where they are in conflict.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report, sgd

model = perceptron(outputs=5)
# + model = samestep.parallel(model)
parameters = list(model.parameters())
optimizer = sgd(model, lr=0.1)
losses = []
for x, y in batches():
    out = model(x)
    tasks = [F.cross_entropy(out[:, :4], y), (out[:, 4] - x.sum(1)).abs().mean()]
    gradients = [torch.cat([g.flatten() for g in torch.autograd.grad(t, parameters, retain_graph=True)]) for t in tasks]
    overlap = gradients[0] @ gradients[1]
    if overlap < 0:
        gradients[0] = gradients[0] - overlap / gradients[1].pow(2).sum() * gradients[1]
    flat = gradients[0] + gradients[1]
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
        p.grad = part.view_as(p).clone()
    optimizer.step()
    losses += [tasks[0].item(), tasks[1].item(), overlap.item()]
report(losses, model)
