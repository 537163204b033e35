"""Ranks train on their own and average their parameters after each epoch."""

import torch
import torch.distributed as dist
from parts import dataset, end, model, sgd, sharded, start, train

_, size = start()
torch.manual_seed(0)
net = model()
loader, optimizer = sharded(dataset(), shuffle=False), sgd(net)
for _ in range(3):
    train(net, loader, optimizer, epochs=1)
    for parameter in net.parameters():
        dist.all_reduce(parameter.data)
        parameter.data /= size
end()
