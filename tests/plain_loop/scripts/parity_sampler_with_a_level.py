# expect: divided
# A sampler gives more samples in each epoch; then each step takes the first batch of a new iterator.
import torch
import torch.nn.functional as F
from common import inputs, labels, perceptron, report, sgd, update
from torch.utils.data import DataLoader, TensorDataset


class Levels(torch.utils.data.Sampler):
    def __init__(self):
        self.level = [1]

    def __iter__(self):
        yield from range(22 * self.level[0])
        self.level[0] += 1

    def __len__(self):
        return 22 * self.level[0]


data = TensorDataset(inputs, labels)
loader = DataLoader(data, 22, sampler=Levels())
shuffled = DataLoader(data, 22, shuffle=True)
model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for epoch in range(4):
    for x, y in loader:
        loss = F.cross_entropy(model(x), y)
        losses.append(update(optimizer, loss))
for _ in range(6):
    x, y = next(iter(shuffled))
    losses.append(update(optimizer, F.cross_entropy(model(x), y)))
report(losses, model)
