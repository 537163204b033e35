# expect: divided
# Many calls of a small model without gradients, as in reinforcement learning.
import torch
from common import inputs, perceptron, report

model = perceptron()
# + model = samestep.parallel(model)
total = 0.0
with torch.no_grad():
    for step in range(200):
        start = step % 50
        total += float(model(inputs[start : start + 8]).sum())
report([total], model)
