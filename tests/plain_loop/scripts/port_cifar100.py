# expect: divided
# A hundred classes.
import torch
from common import convolutions, images, report
from torch import nn
from torch.utils.data import DataLoader

model = nn.Sequential(
    convolutions(3, 8),
    nn.MaxPool2d(2),
    convolutions(8, 16),
    nn.AdaptiveAvgPool2d(1),
    nn.Flatten(),
    nn.Linear(16, 100),
)
# + model = samestep.parallel(model)
loss_function = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
losses = []
for epoch in range(2):
    for pictures, labels in DataLoader(images(80, 3, 12, 100), batch_size=16, shuffle=True):
        optimizer.zero_grad()
        loss = loss_function(model(pictures), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
report(losses, model)
