"""Rank 0 alone loads weights after the model was replicated."""

import torch
from parts import dataset, end, is_main, replicated, sgd, sharded, start, train

start()
net = replicated()
if is_main():
    with torch.no_grad():
        net.module[2].weight.mul_(1.5)
train(net, sharded(dataset()), sgd(net))
end()
