# expect: whole: hook
# A full backward hook of an inner layer logs the norm of its gradient over the whole batch.
import torch.nn.functional as F
from common import batches, perceptron, report, sgd

model = perceptron()
norms = []
model[1].register_full_backward_hook(lambda module, inputs, outputs: norms.append(outputs[0].norm().item()))
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for x, y in batches():
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
report(losses + norms, model)
