# expect: whole: sets a hook of a tensor
# A forward hook keeps an activation and registers a hook for its gradient, as Grad-CAM does.
import torch.nn.functional as F
from common import batches, perceptron, report, sgd, update

model = perceptron()
# + model = samestep.parallel(model)
kept = {}


def keep_gradient(gradient):
    kept["gradient"] = gradient


def keep_activation(module, arguments, output):
    kept["activation"] = output
    if output.requires_grad:
        output.register_hook(keep_gradient)


model[1].register_forward_hook(keep_activation)
optimizer = sgd(model)
losses = []
for x, y in batches():
    loss = F.cross_entropy(model(x), y)
    losses.append(update(optimizer, loss))
    losses.append((kept["activation"].detach() * kept["gradient"]).sum())
    losses.append(kept["gradient"].norm())
report(losses, model)
