# expect: divided
# SWA with its own rate, evaluated after each step; batch norm of the averaged model is computed at the end.
import torch
import torch.nn.functional as F
from common import batches, report, sgd, update
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn

model = nn.Sequential(nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
# + model = samestep.parallel(model)
average = AveragedModel(model)
optimizer = sgd(model, lr=0.05)
scheduler = SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)
losses = []
for number, (x, y) in enumerate(batches()):
    loss = F.cross_entropy(model(x), y)
    update(optimizer, loss)
    if number >= 4:
        average.update_parameters(model)
        scheduler.step()
    with torch.no_grad():
        losses += [loss.item(), F.cross_entropy(average(x), y).item()]
update_bn(batches(), average)
average.eval()
with torch.no_grad():
    losses += [F.cross_entropy(average(x), y).item() for x, y in batches()]
report(losses, model, average)
