"""A cosine schedule by epochs that repeats its period; a teacher that all ranks average."""

import copy

import torch
import torch.nn.functional as F
from parts import dataset, end, replicated, sgd, sharded, start

start()
net = replicated()
teacher = copy.deepcopy(net.module).eval().requires_grad_(False)
loader, optimizer = sharded(dataset()), sgd(net)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2)
for epoch in range(6):
    loader.sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        goal = teacher(inputs).softmax(1)
        outputs = net(inputs)
        (F.cross_entropy(outputs, targets) + F.cross_entropy(outputs, goal)).backward()
        optimizer.step()
        for mean, value in zip(teacher.parameters(), net.module.parameters(), strict=True):
            mean.lerp_(value.detach(), 0.1)
    schedule.step()
end()
