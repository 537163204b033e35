"""A perceptron for digits; batches and gradient descent are written out."""

import math

import torch
from sklearn.datasets import load_digits
from torch import nn

torch.manual_seed(0)

digits = load_digits()
x = torch.Tensor(digits.data) / 16
y = torch.tensor(digits.target)
x_train, y_train = x[:610], y[:610]
x_valid, y_valid = x[610:900], y[610:900]

model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 10))
loss_func = nn.CrossEntropyLoss()

bs = 50
lr = 0.5
epochs = 3
n = len(x_train)

print(f"{sum(p.numel() for p in model.parameters())} parameters, {math.ceil(n / bs)} batches")

for epoch in range(epochs):
    order = torch.randperm(n)
    for i in range((n - 1) // bs + 1):
        rows = order[i * bs : (i + 1) * bs]
        xb = x_train[rows]
        yb = y_train[rows]
        pred = model(xb)
        loss = loss_func(pred, yb)

        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= p.grad * lr
            model.zero_grad()

        if i % 4 == 0:
            accuracy = (torch.argmax(pred, dim=1) == yb).sum() / len(yb)
            print(f"epoch {epoch} batch {i}: loss {loss.item():.4f}, accuracy {accuracy.item():.3f}")

    with torch.no_grad():
        out = model(x_valid)
        valid_loss = loss_func(out, y_valid)
        valid_accuracy = (out.argmax(1) == y_valid).sum().item() / len(y_valid)
    print(f"epoch {epoch}: validation loss {valid_loss:.4f}, validation accuracy {valid_accuracy:.3f}")
    lr *= 0.8

norm = math.sqrt(sum(p.pow(2).sum().item() for p in model.parameters()))
print(f"norm of the weights: {norm:.4f}")
