# expect: divided
# The model is evaluated in inference mode between steps.
import torch
import torch.nn.functional as F
from common import batches, inputs, perceptron, report, sgd

model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for x, y in batches():
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    with torch.inference_mode():
        losses.append(model(inputs[:22]).softmax(1).amax(1).mean())
    losses.append(loss.item())
report(losses, model)
