# expect: divided
# Hooks of parameters clamp the gradient of the whole batch and count its largest entries.
import torch
import torch.nn.functional as F
from common import perceptron, report, sgd, train

model = perceptron()
# + model = samestep.parallel(model)
large = []
for parameter in model.parameters():
    parameter.register_hook(lambda gradient: large.append((gradient.abs() > 0.02).sum().item()))
    parameter.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
losses = train(model, lambda x, y: F.cross_entropy(model(x), y), sgd(model, lr=1.0))
assert len(large) == 4 * len(losses)
report([*losses, torch.tensor(large).sum()], model)
