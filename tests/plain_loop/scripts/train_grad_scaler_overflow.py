# expect: divided
# The first scale of a gradient scaler overflows: steps are left out until the scale fits.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report, sgd

model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, backoff_factor=1e-4, growth_interval=2)
losses = []
for x, y in batches():
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    scaler.scale(1e280 * loss).backward()
    scaler.unscale_(optimizer)
    for p in model.parameters():
        p.grad.div_(1e280)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
report(losses, model)
