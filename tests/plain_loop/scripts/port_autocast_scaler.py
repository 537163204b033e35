# expect: divided
# tolerance: permuted
# Autocast in bfloat16 with a gradient scaler and clipping.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report
from torch import nn

torch.set_default_dtype(torch.float32)
model = perceptron()
# + model = samestep.parallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scaler = torch.amp.GradScaler("cpu")
losses = []
for x, y in batches():
    with torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x.float()), y)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    losses.append(loss.item())
report(losses, model)
