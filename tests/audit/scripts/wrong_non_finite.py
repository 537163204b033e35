"""The weights overflow, and training continues."""

from parts import dataset, end, replicated, sgd, sharded, start, train

start()
net = replicated()
train(net, sharded(dataset()), sgd(net, lr=1e30))
end()
