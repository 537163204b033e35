# expect: divided
# Gradients of two batches are accumulated and clipped.
import torch
import torch.nn.functional as F
from common import classifier, images, report
from torch import nn
from torch.utils.data import DataLoader

model = classifier()
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
losses = []
for epoch in range(2):
    for step, (x, y) in enumerate(DataLoader(images(120), 20, shuffle=True)):
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        losses.append(loss.item())
        if step % 2 == 1:
            losses.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
            optimizer.zero_grad()
report(losses, model)
