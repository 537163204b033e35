# expect: divided
# PGD: the gradient of the inputs moves them, in evaluation mode, before the step of training.
import torch
import torch.nn.functional as F
from common import batches, report, sgd, update
from torch import nn

model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
# + model = samestep.parallel(model)
optimizer = sgd(model, lr=0.1)
losses = []
for x, y in batches():
    model.eval()
    moved = x + 0.01 * torch.randn_like(x)
    for _ in range(2):
        moved.requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(model(moved), y), moved)
        moved = torch.clamp(moved.detach() + 0.05 * slope.sign(), x - 0.1, x + 0.1)
    model.train()
    loss = F.cross_entropy(model(moved), y)
    losses.append(update(optimizer, loss))
report(losses, model)
