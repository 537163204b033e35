"""A linear schedule ends after the first of two epochs; the learning rate stays at zero."""

import torch
from parts import dataset, end, replicated, sgd, sharded, start, train

start()
net = replicated()
loader, optimizer = sharded(dataset(96), batch=4), sgd(net)
schedule = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=len(loader))
train(net, loader, optimizer, schedule=schedule)
end()
