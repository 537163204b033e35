# expect: mixed: is called under torch.func
# MAML with torch.func: the inner step on other weights by functional_call, the outer gradient through it.
import torch.nn.functional as F
from common import batches, perceptron, report, sgd, update
from torch.func import functional_call, grad

model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)


def task_loss(weights, x, y):
    return F.cross_entropy(functional_call(model, weights, (x,)), y)


losses = []
for x, y in batches():
    weights = dict(model.named_parameters())
    slopes = grad(task_loss)(weights, x[:6], y[:6])
    adapted = {name: weight - 0.1 * slopes[name] for name, weight in weights.items()}
    loss = task_loss(adapted, x[6:], y[6:])
    losses.append(update(optimizer, loss))
report(losses, model)
