"""All ranks have the same seed, and so the same masks."""

import torch
from parts import dataset, end, replicated, sgd, sharded, start, train
from torch import nn

start()
torch.manual_seed(0)
net = replicated(nn.Dropout(0.3))
train(net, sharded(dataset()), sgd(net))
end()
