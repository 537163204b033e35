# expect: whole: is called under torch.func
# Differential privacy: gradients of each sample by vmap, clipped one by one, with noise.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report
from torch.func import functional_call, grad, vmap

model = perceptron()
# + model = samestep.parallel(model)


def sample_loss(weights, x, y):
    return F.cross_entropy(functional_call(model, weights, (x[None],)), y[None])


losses = []
for x, y in batches():
    weights = {name: p.detach() for name, p in model.named_parameters()}
    slopes = vmap(grad(sample_loss), in_dims=(None, 0, 0))(weights, x, y)
    norm = torch.stack([slope.flatten(1).norm(dim=1) for slope in slopes.values()]).norm(dim=0)
    factor = (0.5 / norm).clamp(max=1.0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            mean = torch.tensordot(factor, slopes[name], dims=1) / len(x)
            p.sub_(0.5 * (mean + 0.01 * torch.randn_like(p)))
    losses.append(norm.mean().item())
report(losses, model)
