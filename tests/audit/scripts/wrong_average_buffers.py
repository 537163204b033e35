"""The average of the weights takes the running statistics of its own rank."""

import torch
import torch.nn.functional as F
from parts import dataset, end, replicated, sgd, sharded, start
from torch import nn
from torch.optim.swa_utils import AveragedModel

start()
net = replicated(nn.BatchNorm1d(16))
average = AveragedModel(net.module)
optimizer = sgd(net)
for inputs, targets in sharded(dataset()):
    optimizer.zero_grad()
    F.cross_entropy(net(inputs), targets).backward()
    optimizer.step()
    average.update_parameters(net.module)
average.eval()
with torch.no_grad():
    for inputs, _ in sharded(dataset(38), shuffle=False):
        average(inputs)
end()
