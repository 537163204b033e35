"""Ranks train different models on all samples; no gradients are reduced."""

from parts import dataset, end, model, sgd, start, train
from torch.utils.data import DataLoader

start()
net = model()
train(net, DataLoader(dataset(), 8, shuffle=True), sgd(net))
end()
