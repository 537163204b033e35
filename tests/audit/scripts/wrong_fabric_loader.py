"""The loader is not set up."""

from fabric_parts import start, train

fabric, net, optimizer, loader = start()
net, optimizer = fabric.setup(net, optimizer)
for _ in range(2):
    train(fabric, net, optimizer, loader)
