# expect: divided
# Hooks and kept gradients of outputs, a backward from given gradients, and the detection of anomalies.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report, sgd

model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model, lr=0.1)
results = []
for x, y in batches():
    out = model(x)
    out.register_hook(lambda slope: slope.clamp(-0.05, 0.05))
    out.retain_grad()
    rows = F.cross_entropy(out, y, reduction="none")
    optimizer.zero_grad()
    with torch.autograd.detect_anomaly(check_nan=True):
        rows.backward(gradient=torch.rand(len(x)) / len(x))
    optimizer.step()
    results += [rows.mean().item(), out.grad.square().sum().item()]
report(results, model)
