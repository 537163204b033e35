"""Each rank takes the part of rank 0, with augmented samples."""

from parts import Noisy, end, replicated, sgd, sharded, start, train

start()
net = replicated()
train(net, sharded(Noisy(), num_replicas=2, rank=0), sgd(net))
end()
