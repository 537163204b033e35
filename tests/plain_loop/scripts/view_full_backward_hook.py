# expect: whole: has a backward hook on Linear
# A full backward hook of a layer keeps the norm of its gradients.
import torch.nn.functional as F
from common import perceptron, report, train

model = perceptron()
# + model = samestep.parallel(model)
norms = []


def keep_norm(module, gradient_inputs, gradient_outputs):
    norms.append(gradient_outputs[0].norm().item())


model[0].register_full_backward_hook(keep_norm)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses + norms, model)
