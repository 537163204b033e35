# expect: divided
# Transfer learning on images: batch norm, cosine schedule, running mean of the loss, evaluation, one file per epoch.
import math

import torch
from common import images, report
from torch import nn
from torch.utils.data import DataLoader


def block(inputs, outputs):
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, 2, 1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


def create_model(classes):
    return nn.Sequential(
        block(3, 8),
        block(8, 16),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, classes),
    )


def train_one_epoch(model, optimizer, loader):
    model.train()
    loss_function = nn.CrossEntropyLoss()
    mean_loss = torch.zeros(1)
    optimizer.zero_grad()
    for step, (pictures, labels) in enumerate(loader):
        loss = loss_function(model(pictures), labels)
        loss.backward()
        mean_loss = (mean_loss * step + loss.detach()) / (step + 1)
        optimizer.step()
        optimizer.zero_grad()
    return mean_loss.item()


@torch.no_grad()
def evaluate(model, loader):
    model.eval()
    correct = torch.zeros(1)
    for pictures, labels in loader:
        predictions = torch.max(model(pictures), dim=1)[1]
        correct += torch.eq(predictions, labels).sum()
    return correct.item() / len(loader.dataset)


train_loader = DataLoader(images(96, 3, 16), batch_size=16, shuffle=True)
test_loader = DataLoader(images(43, 3, 16, seed=1), batch_size=16)
model = create_model(5)
# + model = samestep.parallel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-3)
EPOCHS = 2
scheduler = torch.optim.lr_scheduler.LambdaLR(
    optimizer, lambda epoch: (1 + math.cos(epoch * math.pi / EPOCHS)) / 2 * 0.9 + 0.1
)
results = []
for epoch in range(EPOCHS):
    results.append(train_one_epoch(model, optimizer, train_loader))
    scheduler.step()
    results.append(evaluate(model, test_loader))
report(results, model)
