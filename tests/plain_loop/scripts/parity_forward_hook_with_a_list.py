# expect: whole: changes the global variable kept
# A forward hook of a layer moves a mean in a list of the script.
import torch.nn.functional as F
from common import batches, perceptron, report, sgd, update

kept = [1.0]


def normalise(module, arguments, output):
    if module.training:
        kept[0] = 0.9 * kept[0] + 0.1 * float(output.detach().abs().mean())
    return output / kept[0]


model = perceptron()
# + model = samestep.parallel(model)
model[0].register_forward_hook(normalise)
optimizer = sgd(model)
losses = []
for epoch in range(3):
    for x, y in batches(4):
        loss = F.cross_entropy(model(x), y)
        losses.append(update(optimizer, loss))
report(losses, model)
