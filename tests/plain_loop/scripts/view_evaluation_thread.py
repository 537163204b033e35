# expect: mixed: is called in another thread
# A thread evaluates the model after each step.
import threading

import torch
import torch.nn.functional as F
from common import batches, inputs, perceptron, report, sgd, update

model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
results = []


def evaluate():
    with torch.no_grad():
        results.append(model(inputs[:20]).square().mean().item())


for x, y in batches():
    loss = F.cross_entropy(model(x), y)
    update(optimizer, loss)
    thread = threading.Thread(target=evaluate)
    thread.start()
    thread.join()
report(results, model)
