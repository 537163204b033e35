# expect: divided
# Each parameter has an optimizer of its own, which steps in a hook as soon as the gradient is complete.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report

model = perceptron()
# + model = samestep.parallel(model)
optimizers = {p: torch.optim.Adam([p], lr=0.01) for p in model.parameters()}


def step(parameter):
    optimizers[parameter].step()
    optimizers[parameter].zero_grad()


for parameter in model.parameters():
    parameter.register_post_accumulate_grad_hook(step)
losses = []
for x, y in batches():
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    losses.append(loss.item())
report(losses, model)
