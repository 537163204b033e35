# expect: whole
# A forward hook puts hidden features into a list of the script, and the loss uses them.
import torch.nn.functional as F
from common import batches, perceptron, report, sgd, update

model = perceptron()
features = []
model[1].register_forward_hook(lambda module, inputs, output: features.append(output))
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for x, y in batches():
    features.clear()
    loss = F.cross_entropy(model(x), y) + 0.1 * features[0].std(0).mean()
    losses.append(update(optimizer, loss))
report(losses, model)
