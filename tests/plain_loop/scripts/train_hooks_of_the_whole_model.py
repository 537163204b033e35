# expect: divided
# Hooks of the outermost module see whole batches, whole outputs and whole gradients.
import torch.nn.functional as F
from common import batches, perceptron, report, sgd, update

model = perceptron()
# + model = samestep.parallel(model)
seen = []
model.register_forward_pre_hook(lambda module, inputs: (inputs[0] - inputs[0].mean(0),))
model.register_forward_hook(lambda module, inputs, output: output - output.mean())
optimizer = sgd(model)
losses = []
for x, y in batches():
    logits = model(x)
    logits.register_hook(lambda gradient: seen.append(gradient.norm().item()))
    loss = F.cross_entropy(logits, y)
    losses.append(update(optimizer, loss))
report(losses + seen, model)
