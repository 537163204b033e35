# expect: divided
# Hooks of the parameters clamp the gradient of the batch.
import torch.nn.functional as F
from common import batches, perceptron, report, sgd

model = perceptron()
# + model = samestep.parallel(model)
for parameter in model.parameters():
    parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
optimizer = sgd(model)
losses = []
for epoch in range(3):
    for x, y in batches(4):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report(losses, model)
