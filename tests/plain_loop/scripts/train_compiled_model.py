# expect: divided
# limit: 120
# The compiled model is trained; the original one is evaluated.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report, train

model = perceptron()
# + model = samestep.parallel(model)
compiled = torch.compile(model, backend="aot_eager")
losses = train(model, lambda x, y: F.cross_entropy(compiled(x), y))
with torch.no_grad():
    losses += [F.cross_entropy(model(x), y).item() for x, y in batches()]
report(losses, model)
