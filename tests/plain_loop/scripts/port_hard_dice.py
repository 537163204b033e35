# expect: divided
# Dice of one class over the whole batch.
import torch
from common import classifier, images, report
from torch.utils.data import DataLoader

model = classifier()
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
losses = []
for epoch in range(2):
    for x, y in DataLoader(images(120), 24, shuffle=True):
        p = model(x).softmax(1)[:, 1]
        t = (y == 1).double()
        loss = 1 - (p * t).sum() / (p.sum() + t.sum())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report(losses, model)
