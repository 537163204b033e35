"""Training on one device: digits, a small convolutional net, one line per evaluation."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EVERY = 128  # samples between evaluations

torch.manual_seed(0)
images, labels = load_digits(return_X_y=True)
inputs = torch.as_tensor(images / 16).float().reshape(-1, 1, 8, 8)
targets = torch.as_tensor(labels)
training = TensorDataset(inputs[:1280], targets[:1280])
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.BatchNorm2d(16),
    nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Dropout(0.2),
    nn.Linear(16 * 4 * 4, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
seen = 0

for _ in range(2):
    for batch, target in DataLoader(training, batch_size=32, shuffle=True):
        model.train()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch), target).backward()
        optimizer.step()
        seen += len(batch)
        if seen % EVERY == 0:
            model.eval()
            with torch.no_grad():
                loss = nn.functional.cross_entropy(model(inputs[1280:]), targets[1280:])
            print(f"{seen} {loss:.6f}")
