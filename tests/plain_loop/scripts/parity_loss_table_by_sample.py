# expect: divided
# A table holds a weight for each sample, and moves by the losses.
import torch
import torch.nn.functional as F
from common import inputs, labels, perceptron, report, sgd
from torch.utils.data import DataLoader, Dataset


class Indexed(Dataset):
    def __len__(self):
        return 110

    def __getitem__(self, index):
        return inputs[index], labels[index], index


table = torch.ones(110)
model = perceptron()
# + model = samestep.parallel(model)
optimizer = sgd(model)
losses = []
for epoch in range(2):
    for x, y, index in DataLoader(Indexed(), 22, shuffle=True):
        each = F.cross_entropy(model(x), y, reduction="none")
        weight = table[index]
        table[index] = 0.5 * weight + 0.5 * each.detach()
        loss = (weight * each).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report([*losses, *table.tolist()], model)
