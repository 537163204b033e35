# expect: divided
# Hooks of the outermost module see whole batches.
import torch.nn.functional as F
from common import perceptron, report, train

model = perceptron()
# + model = samestep.parallel(model)
seen = []


def halve_inputs(module, arguments):
    (x,) = arguments
    seen.append(len(x))
    return (x * 0.5,)


def centre_outputs(module, arguments, output):
    return output - output.mean(0)


model.register_forward_pre_hook(halve_inputs)
model.register_forward_hook(centre_outputs)
losses = train(model, lambda x, y: F.cross_entropy(model(x), y))
report(losses + seen, model)
