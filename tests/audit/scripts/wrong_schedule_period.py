"""The period of the schedule counts the batches of an epoch divided by the ranks once too often."""

import torch
from parts import dataset, end, replicated, sgd, sharded, start, train

_, size = start()
net = replicated()
loader, optimizer = sharded(dataset(96), batch=4), sgd(net)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2 * len(loader) // size)
train(net, loader, optimizer, schedule=schedule)
end()
