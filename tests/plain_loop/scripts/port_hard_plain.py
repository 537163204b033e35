# expect: divided
# Batch norm, dropout, momentum, evaluation.
import torch
import torch.nn.functional as F
from common import classifier, images, report
from torch.utils.data import DataLoader

model = classifier()
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
losses = []
for epoch in range(2):
    model.train()
    for x, y in DataLoader(images(120), 24, shuffle=True):
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    with torch.no_grad():
        for x, y in DataLoader(images(120), 50):
            losses.append((model(x).argmax(1) == y).sum().item())
report(losses, model)
