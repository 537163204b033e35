# expect: divided
# Gradients are read, scaled, centred and replaced before the step; some parameters are left out by hand.
import torch.nn.functional as F
from common import batches, perceptron, report, sgd

model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
results = []
for step, (x, y) in enumerate(batches()):
    optimizer.zero_grad(set_to_none=step % 2 == 0)
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    norms = [p.grad.norm().item() for p in model.parameters()]
    for p in model.parameters():
        if p.dim() == 2:
            p.grad -= p.grad.mean(1, keepdim=True)
        else:
            p.grad = p.grad.sign() * 0.01
    if step % 3 == 0:
        model[2].bias.grad = None
    optimizer.step()
    results += [loss.item(), *norms]
report(results, model)
