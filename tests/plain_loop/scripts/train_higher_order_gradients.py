# expect: divided
# Gradients of gradients: the norm of the gradient of the weights is part of the loss.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report, sgd

model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model, lr=0.05)
losses = []
for x, y in batches():
    loss = F.cross_entropy(model(x), y)
    slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    sharpness = sum(slope.pow(2).sum() for slope in slopes)
    optimizer.zero_grad()
    (loss + 0.1 * sharpness).backward()
    optimizer.step()
    losses += [loss.item(), sharpness.item()]
report(losses, model)
