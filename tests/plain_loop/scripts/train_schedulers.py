# expect: divided
# Warm-up, then cosine, for two groups of parameters: no weight decay of biases, a smaller rate of the first layer.
import torch
import torch.nn.functional as F
from common import batches, perceptron, report, update
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

model = perceptron()
# + model = samestep.parallel(model)
weights = [p for p in model.parameters() if p.ndim > 1]
biases = [p for p in model.parameters() if p.ndim == 1]
groups = [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0, "lr": 0.02}]
optimizer = torch.optim.AdamW(groups, lr=0.01)
schedules = [LinearLR(optimizer, 0.1, total_iters=4), CosineAnnealingLR(optimizer, T_max=6)]
scheduler = SequentialLR(optimizer, schedules, milestones=[4])
losses = []
for x, y in batches():
    loss = F.cross_entropy(model(x), y)
    update(optimizer, loss)
    scheduler.step()
    losses += [loss.item(), *scheduler.get_last_lr()]
report(losses, model)
