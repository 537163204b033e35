# expect: whole: anomalies
# Anomaly detection raises in the backward for one bad sample; the script skips the batch.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report, sgd
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, x):
        return self.net(x.abs().sqrt() * self.net[0].bias[:12])


model = Net()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
with torch.autograd.set_detect_anomaly(True):
    for step, (x, y) in enumerate(batches(12)):
        x = x.clone().requires_grad_()
        with torch.no_grad():
            if step in (4, 8):
                x[-1, 0] = 0.0
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        try:
            loss.backward()
        except RuntimeError:
            losses.append(-1.0)
            continue
        optimizer.step()
        losses.append(loss.item())
report(losses, model)
