# expect: divided
# Saved tensors go to the CPU, or are packed in lower precision by hooks of the script.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report, sgd, update
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for step, (x, y) in enumerate(batches(12)):
    hooks = save_on_cpu() if step % 2 else saved_tensors_hooks(torch.clone, torch.clone)
    with hooks:
        loss = F.cross_entropy(model(x), y)
    losses.append(update(optimizer, loss))
report(losses, model)
