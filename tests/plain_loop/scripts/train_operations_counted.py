# expect: mixed: observes operations
# The script counts the floating-point operations of a step by a mode of torch.
import torch.nn.functional as F
from common import batches, perceptron, report, sgd
from torch.utils.flop_counter import FlopCounterMode

model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for step, (x, y) in enumerate(batches()):
    counter = FlopCounterMode(display=False)
    if step == 2:
        with counter:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
    else:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
    losses += [loss.item(), counter.get_total_flops()]
    optimizer.step()
    optimizer.zero_grad()
report(losses, model)
