# expect: mixed: forward-mode derivatives
# Forward-mode derivatives and products with the Hessian, and calls of the plain loop.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report, sgd, update
from torch.autograd import forward_ad
from torch.autograd.functional import vhp

model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model, lr=0.1)
results = []
for x, y in batches():
    with forward_ad.dual_level():
        slope = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    _, product = vhp(lambda x: model(x).square().sum(), x, torch.ones_like(x))
    loss = F.cross_entropy(model(x), y) + 0.1 * slope.square().mean()
    results += [update(optimizer, loss), product.square().mean().item()]
report(results, model)
