"""The loop calls the model from before the setup."""

from fabric_parts import start, train

fabric, net, optimizer, loader = start()
_, optimizer = fabric.setup(net, optimizer)
loader = fabric.setup_dataloaders(loader)
for _ in range(2):
    train(fabric, net, optimizer, loader)
