"""The learning rate depends on the rank."""

from parts import dataset, end, replicated, sgd, sharded, start, train

rank, _ = start()
net = replicated()
train(net, sharded(dataset()), sgd(net, lr=0.1 / (1 + rank)))
end()
