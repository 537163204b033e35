# expect: divided
# Two calls with a backward each before one step; gradients are zeroed in place.
import torch.nn.functional as F
from common import batches, perceptron, report, sgd

model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for x, y in batches():
    optimizer.zero_grad(set_to_none=False)
    clean, noisy = model(x), model(x + 0.1 * x.sin())
    F.mse_loss(noisy, clean.detach()).backward()
    loss = F.cross_entropy(clean, y)
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses, model)
