"""The script forgets the process group: each rank trains a model of its own on all samples."""

from parts import dataset, model, sgd, train
from torch.utils.data import DataLoader

net = model()
train(net, DataLoader(dataset(), 8, shuffle=True), sgd(net))
