"""Training script for one device: handwritten digits, with an evaluation and a checkpoint after each epoch."""

import os
import sys

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = int(sys.argv[1]) if len(sys.argv) > 1 else 6
torch.manual_seed(0)
images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
data = TensorDataset(images.float().view(-1, 1, 8, 8) / 16, labels)
train, test = torch.utils.data.random_split(data, [1437, 360])
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(
    nn.Conv2d(1, 24, 3, padding=1),
    nn.BatchNorm2d(24),
    nn.ReLU(),
    nn.Conv2d(24, 48, 3, padding=1),
    nn.BatchNorm2d(48),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d(2),
    nn.Flatten(),
    nn.Dropout(0.2),
    nn.Linear(192, 10),
).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)

first = 0
if os.path.exists("digits.pt"):
    saved = torch.load("digits.pt", map_location=device)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["epoch"]

for epoch in range(first, EPOCHS):
    torch.manual_seed(epoch)  # so that a resumed run has the order and the dropout of a whole one
    model.train()
    for inputs, targets in DataLoader(train, batch_size=128, shuffle=True):
        loss = functional.cross_entropy(model(inputs.to(device)), targets.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    total = correct = 0.0
    with torch.no_grad():
        for inputs, targets in DataLoader(test, batch_size=128):
            outputs = model(inputs.to(device)).cpu()
            total += functional.cross_entropy(outputs, targets, reduction="sum").item()
            correct += (outputs.argmax(dim=1) == targets).sum().item()
    print(
        f"epoch {epoch + 1:2}  test loss {total / len(test):.4f}  accuracy {correct / len(test):.2%}"
    )
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": epoch + 1,
    }
    torch.save(state, "digits.part")
    os.replace("digits.part", "digits.pt")
