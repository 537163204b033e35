"""The samples are divided, and the gradients of a plain model are not reduced."""

import torch
from parts import dataset, end, model, sgd, sharded, start, train

start()
torch.manual_seed(0)
net = model()
train(net, sharded(dataset()), sgd(net))
end()
