"""Each rank has an ordinary shuffling loader."""

from parts import dataset, end, replicated, sgd, start, train
from torch.utils.data import DataLoader

start()
net = replicated()
train(net, DataLoader(dataset(), 8, shuffle=True), sgd(net))
end()
