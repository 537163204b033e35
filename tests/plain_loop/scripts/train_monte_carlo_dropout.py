# expect: divided
# Uncertainty by dropout in an evaluation: many calls without gradients in train mode.
import torch
import torch.nn.functional as F
from common import batches, report, sgd, update
from torch import nn

model = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 4))
# + model = samestep.parallel(model)
optimizer = sgd(model)
results = []
for x, y in batches():
    loss = F.cross_entropy(model(x), y)
    update(optimizer, loss)
    with torch.no_grad():
        samples = torch.stack([model(x).softmax(1) for _ in range(4)])
    results += [loss.item(), samples.var(0).mean().item()]
report(results, model)
