# expect: divided
# A moving average of the weights is evaluated after each step.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report, sgd
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

model = perceptron()
# + model = samestep.parallel(model)
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = sgd(model)
losses = []
for x, y in batches():
    loss = F.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.update_parameters(model)
    with torch.no_grad():
        losses += [loss.item(), F.cross_entropy(average(x), y).item()]
report(losses, model, average)
