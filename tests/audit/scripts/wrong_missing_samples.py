"""The data are divided for twice as many ranks."""

from parts import dataset, end, replicated, sgd, sharded, start, train

rank, size = start()
net = replicated()
train(net, sharded(dataset(), num_replicas=2 * size, rank=rank), sgd(net))
end()
