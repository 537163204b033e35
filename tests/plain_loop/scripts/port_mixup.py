# expect: divided
# Mixup: images and losses of two permutations of the batch.
import torch
import torch.nn.functional as F
from common import convolutions, images, report
from torch import nn
from torch.utils.data import DataLoader

model = nn.Sequential(
    convolutions(1, 8),
    nn.MaxPool2d(2),
    convolutions(8, 16),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(16, 5),
)
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
losses = []
for epoch in range(2):
    for x, y in DataLoader(images(110), batch_size=22, shuffle=True):
        share = torch.distributions.Beta(0.4, 0.4).sample().item()
        order = torch.randperm(len(x))
        out = model(share * x + (1 - share) * x[order])
        loss = share * F.cross_entropy(out, y) + (1 - share) * F.cross_entropy(out, y[order])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report(losses, model)
