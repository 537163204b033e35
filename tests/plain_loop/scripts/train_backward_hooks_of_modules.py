# expect: whole: hook
# A full backward hook of an inner layer logs the norm of its gradient over the whole batch.
import torch.nn.functional as F
from common import perceptron, report, train

model = perceptron()
norms = []
model[1].register_full_backward_hook(lambda module, inputs, outputs: norms.append(outputs[0].norm().item()))
# + model = samestep.parallel(model)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses + norms, model)
