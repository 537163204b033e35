# expect: divided
# The loss contains the squares of the parameters.
import torch
import torch.nn.functional as F
from common import classifier, images, report
from torch.utils.data import DataLoader

model = classifier()
# + model = samestep.parallel(model)


def loss_of(x, y):
    penalty = sum(parameter.square().sum() for parameter in model.parameters())
    return F.cross_entropy(model(x), y) + 0.01 * penalty


optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
losses = []
for epoch in range(2):
    for x, y in DataLoader(images(120), 24, shuffle=True):
        loss = loss_of(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report(losses, model)
