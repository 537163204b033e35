"""Each epoch sets up a new loader, which begins with the first order."""

from fabric_parts import start, train

fabric, net, optimizer, loader = start()
net, optimizer = fabric.setup(net, optimizer)
for _ in range(3):
    train(fabric, net, optimizer, fabric.setup_dataloaders(loader))
