# expect: whole: changes the global variable sizes
# imports: torch.export._trace torch._functorch.compilers
# Hooks print a summary of the layers; the model is traced and exported.
import torch
from common import inputs, perceptron, report

model = perceptron()
# + model = samestep.parallel(model)
sizes = []


def keep_size(module, arguments, output):
    sizes.append(output.shape[0] * output.shape[1])


handles = [layer.register_forward_hook(keep_size) for layer in model]
model.eval()
model(inputs[:12])
for handle in handles:
    handle.remove()
traced = torch.jit.trace(model, inputs[:12])
results = [*sizes, traced(inputs[:30]).sum(), traced(inputs[:5]).sum()]
model.train()
exported = torch.export.export(model, (inputs[:12],))
results.append(exported.module()(inputs[:12]).sum())
report(results, model)
