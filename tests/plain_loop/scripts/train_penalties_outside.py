# expect: divided
# Penalties on parameters in the loop: L2, L1 of one layer, distance to the first weights (EWC), orthogonality.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report, sgd

model = perceptron()
# + model = samestep.parallel(model)
first = {name: p.detach().clone() for name, p in model.named_parameters()}
optimizer = sgd(model, lr=0.1)
losses = []
for x, y in batches():
    loss = F.cross_entropy(model(x), y)
    loss = loss + 1e-2 * sum(p.pow(2).sum() for p in model.parameters()) + 1e-2 * model[0].weight.abs().sum()
    loss = loss + 0.1 * sum((p - first[name]).pow(2).mean() for name, p in model.named_parameters())
    loss = loss + 1e-2 * (model[2].weight @ model[2].weight.T - torch.eye(4)).pow(2).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
