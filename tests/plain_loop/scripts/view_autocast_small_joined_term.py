# expect: whole: joins samples
# tolerance: permuted
# Autocast hides a small term that joins samples.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report
from torch import nn

torch.set_default_dtype(torch.float32)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = perceptron()

    def forward(self, x, y):
        out = self.net(x)
        mean = out.softmax(1).mean(0)
        return F.cross_entropy(out, y) + 3e-5 * mean.square().sum(), out


model = Net()
# + model = samestep.parallel(model)
scaler = torch.amp.GradScaler("cpu")
optimizer = torch.optim.AdamW(model.parameters(), 0.01)
losses = []
for x, y in batches():
    with torch.autocast("cpu", torch.bfloat16):
        loss, _ = model(x.float(), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
report(losses, model)
